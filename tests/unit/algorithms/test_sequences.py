from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.algorithms.sequences import num_sequences, sequence_ids, sequence_means, sequence_sums, spread

FLAT = torch.tensor([1.0, 2.0, math.nan, 4.0, 5.0])
MASK = torch.tensor([True, True, False, True, True])
CU_SEQLENS = torch.tensor([0, 3, 3, 5])  # the second sequence is empty
PADDED = torch.tensor([[1.0, 2.0, math.nan], [math.nan] * 3, [4.0, 5.0, math.inf]])
PADDED_MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 0]], dtype=torch.bool)


@pytest.mark.parametrize(("values", "mask", "cu_seqlens"), [(FLAT, MASK, CU_SEQLENS), (PADDED, PADDED_MASK, None)])
def test_sums_and_means_read_nothing_off_the_mask(
    values: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> None:
    assert num_sequences(values, cu_seqlens) == 3
    assert sequence_sums(values, mask, cu_seqlens).tolist() == [3.0, 0.0, 9.0]
    assert sequence_means(values, mask, cu_seqlens).tolist() == [1.5, 0.0, 4.5]


def test_sums_are_differentiable_on_the_mask_alone() -> None:
    values = FLAT.clone().requires_grad_()
    (sequence_sums(values, MASK, CU_SEQLENS) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0, 0.0, 3.0, 3.0]


def test_sums_of_many_small_terms_keep_their_digits() -> None:
    values = torch.full((1, 100_000), 0.1)
    # 0.1 in fp32 is 0.100000001490116; added up in fp32 the sum is off by more than 1
    assert sequence_sums(values, values > 0, None).item() == pytest.approx(10000.000149, abs=1e-5)


def test_spread_gives_each_slot_its_sequence() -> None:
    assert sequence_ids(FLAT, CU_SEQLENS).tolist() == [0, 0, 0, 2, 2]
    assert spread(torch.tensor([7, 8, 9]), FLAT, CU_SEQLENS).tolist() == [7, 7, 7, 9, 9]
    assert spread(torch.tensor([7, 8, 9]), PADDED, None).tolist() == [[7] * 3, [8] * 3, [9] * 3]


def test_refuses() -> None:
    with pytest.raises(ValueError, match="needs cu_seqlens"):
        num_sequences(FLAT, None)
    with pytest.raises(ValueError, match="padded"):
        num_sequences(PADDED, CU_SEQLENS)
    with pytest.raises(ValueError, match=r"got shape \(1, 3, 3\)"):
        num_sequences(PADDED[None], None)
    with pytest.raises(ValueError, match="run from 0 to num_tokens=5, got 1 to 5"):
        num_sequences(FLAT, torch.tensor([1, 5]))
    with pytest.raises(ValueError, match=r"shape \[B\+1\]"):
        num_sequences(FLAT, torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \[3\], got \(2,\)"):
        spread(torch.tensor([7, 8]), FLAT, CU_SEQLENS)
