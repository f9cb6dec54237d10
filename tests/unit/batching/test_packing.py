from __future__ import annotations

import pytest
import torch
from hypothesis import given
from support.ragged import Ragged, few_examples, ragged

from lightning_rlhf.batching.packing import flat_to_padded, padded_to_flat, real_slots


def test_by_hand() -> None:
    flat, cu_seqlens = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 2, 5])
    padded = flat_to_padded(flat, cu_seqlens, -1)
    assert padded.tolist() == [[1, 2, -1], [-1, -1, -1], [3, 4, 5]]
    assert real_slots(cu_seqlens.diff()).tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert padded_to_flat(padded, cu_seqlens.diff()).tolist() == flat.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@given(case=ragged())
@few_examples
def test_exact_both_ways_for_every_dtype(dtype: torch.dtype, case: Ragged) -> None:
    flat = (case.log_probs * 10).to(dtype)
    padded = flat_to_padded(flat, case.cu_seqlens, 0)
    assert padded.dtype == dtype
    assert torch.equal(padded, case.padded(flat, width=max(case.lengths)))
    assert torch.equal(padded_to_flat(padded, case.cu_seqlens.diff()), flat)


def test_further_dimensions_and_gradients_pass_through() -> None:
    flat, cu_seqlens = torch.arange(10.0).reshape(5, 2).requires_grad_(), torch.tensor([0, 1, 5])
    padded = flat_to_padded(flat, cu_seqlens, 7.0)
    assert padded.shape == (2, 4, 2)
    back = padded_to_flat(padded, cu_seqlens.diff())
    assert torch.equal(back, flat)
    (back * torch.arange(10.0).reshape(5, 2)).sum().backward()
    assert torch.equal(flat.grad, torch.arange(10.0).reshape(5, 2))


def test_no_sequences_at_all() -> None:
    padded = flat_to_padded(torch.zeros(0), torch.zeros(1, dtype=torch.int64), 0.0)
    assert padded.shape == (0, 0)
    assert padded_to_flat(padded, torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="rise from 0 to num_tokens=3, got 0 to 2"):
        flat_to_padded(torch.ones(3), torch.tensor([0, 2]), 0)
    with pytest.raises(ValueError, match=r"shape \[B\+1\]"):
        flat_to_padded(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match="padded width 3, got 1 to 4"):
        padded_to_flat(torch.ones(2, 3), torch.tensor([1, 4]))
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(1,\)"):
        padded_to_flat(torch.ones(2, 3), torch.tensor([1]))
