from __future__ import annotations

import pytest
import torch
from hypothesis import given
from support.ragged import Ragged, few_examples, ragged
from torch import Tensor

from lightning_rlhf.algorithms.aggregation import loss_weights

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def weights_of(mask: Tensor, mode: str, **kwargs: object) -> Tensor:
    return loss_weights(mask, mode, norm_length=10, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "expected"), [("token-mean", 4.0), ("seq-mean-token-mean", 4.5), ("seq-mean-token-sum", 6.0)]
)
def test_a01_masked_tokens_stay_out_of_every_mode(mode: str, expected: float) -> None:
    terms = torch.tensor([[2.0, 4.0, 50.0], [6.0, -30.0, 7.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    loss = (terms * weights_of(mask, mode)).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert terms.grad is not None
    assert terms.grad[mask == 0].tolist() == [0.0, 0.0, 0.0]
    if mode == "token-mean":
        assert terms.grad[mask == 1].tolist() == pytest.approx([1 / 3] * 3)


def test_a03_the_sum_over_ranks_and_micro_batches_is_the_global_token_mean() -> None:
    # (valid tokens, mean loss) of two micro-batches on each of two ranks: 22 over 8 tokens
    ranks = [[(4, 1.0), (2, 5.0)], [(1, 8.0), (1, 0.0)]]
    scale = torch.ones((), requires_grad=True)
    loss = torch.zeros(())
    for micro_batches in ranks:
        for count, mean in micro_batches:
            mask = torch.tensor([True] * count + [False] * 3)
            cu_seqlens = torch.tensor([0, mask.numel()])
            weights = weights_of(mask, "token-mean", cu_seqlens=cu_seqlens, num_global_tokens=8)
            loss = loss + (scale * mean * weights).sum()
    loss.backward()
    assert loss.item() == pytest.approx(2.75)
    assert scale.grad is not None
    assert scale.grad.item() == pytest.approx(2.75)


@pytest.mark.parametrize("split", [[[0], [1, 2]], [[0, 1], [2]], [[0], [1], [2]]])
@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 2.166667), ("seq-mean-token-mean", 2.333333)])
def test_a03_lengths_2_6_4_give_one_mean_for_any_split(split: list[list[int]], mode: str, expected: float) -> None:
    lengths, means = [2, 6, 4], [2.0, 1.0, 4.0]
    total = 0.0
    for rows in split:
        terms = torch.cat([torch.full((lengths[row],), means[row]) for row in rows])
        cu_seqlens = torch.tensor([0, *torch.tensor([lengths[row] for row in rows]).cumsum(0).tolist()])
        weights = weights_of(
            torch.ones_like(terms), mode, cu_seqlens=cu_seqlens, num_global_tokens=12, num_global_sequences=3
        )
        total += float((terms * weights).sum())
    assert total == pytest.approx(expected, abs=1e-6)


def test_a04_a_masked_completion_leaves_the_denominator_too() -> None:
    mask = torch.tensor([[1] * 4 + [0] * 4, [1] * 4 + [0] * 4, [0] * 8])
    terms = torch.tensor([[1.0], [2.0], [99.0]]).expand(3, 8)
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert float((terms * weights_of(mask, mode)).sum()) == pytest.approx(1.5)
    assert float((terms * weights_of(mask, "seq-mean-token-sum")).sum()) == pytest.approx(6.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", [{}, {"num_global_tokens": 0, "num_global_sequences": 0}])
def test_a04_a_batch_without_any_token_weighs_exactly_nothing(mode: str, counts: dict[str, int]) -> None:
    assert weights_of(torch.zeros(3, 8), mode, **counts).tolist() == [[0.0] * 8] * 3
    empty = weights_of(torch.zeros(0), mode, cu_seqlens=torch.zeros(1, dtype=torch.int64), **counts)
    assert empty.shape == (0,)


def test_dr_grpo_divides_by_sequences_times_the_constant() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    assert loss_weights(mask, "seq-mean-token-sum-norm", norm_length=4).tolist() == [
        [0.125, 0.125, 0, 0],
        [0.125, 0, 0, 0],
    ]


def naive(mask: Ragged, mode: str) -> list[float]:
    total = int(mask.mask.sum())
    counts = [int(mask.mask[part].sum()) for part in mask.slices()]
    sequences = sum(count > 0 for count in counts)
    out: list[float] = []
    for part, count in zip(mask.slices(), counts, strict=True):
        per = {
            "token-mean": lambda _: 1 / total,
            "seq-mean-token-mean": lambda n: 1 / (sequences * n),
            "seq-mean-token-sum": lambda _: 1 / sequences,
            "seq-mean-token-sum-norm": lambda _: 1 / (sequences * 10),
        }[mode]
        out += [per(count) if on else 0.0 for on in mask.mask[part].tolist()]
    return out


@pytest.mark.parametrize("mode", MODES)
@given(case=ragged())
@few_examples
def test_matches_a_naive_loop_flat_padded_and_split(mode: str, case: Ragged) -> None:
    flat = weights_of(case.mask, mode, cu_seqlens=case.cu_seqlens)
    assert flat.dtype == torch.float32
    assert flat.tolist() == pytest.approx(naive(case, mode))
    width = 3 * max(case.lengths) + 1
    assert torch.equal(weights_of(case.padded(case.mask, width=width), mode), case.padded(flat, width=width))
    num_sequences = sum(bool(case.mask[part].any()) for part in case.slices())
    parts = [
        weights_of(
            case.mask[part],
            mode,
            cu_seqlens=torch.tensor([0, length]),
            num_global_tokens=int(case.mask.sum()),
            num_global_sequences=num_sequences,
        )
        for part, length in zip(case.slices(), case.lengths, strict=True)
    ]
    assert torch.equal(torch.cat(parts), flat)


@pytest.mark.parametrize(
    ("mode", "kwargs", "message"),
    [
        ("mean", {}, "Unknown aggregation 'mean'"),
        ("seq-mean-token-sum-norm", {"norm_length": None}, "norm_length must be at least 1, got None"),
        ("token-mean", {"num_global_tokens": 3}, "num_global_tokens=3, but this mask alone holds 4"),
        ("seq-mean-token-sum", {"num_global_sequences": 1}, "num_global_sequences=1, but this mask alone holds 2"),
        ("seq-mean-token-mean", {"cu_seqlens": torch.tensor([0, 4])}, "padded"),
    ],
)
def test_refuses(mode: str, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_weights(torch.ones(2, 2), mode, **kwargs)  # type: ignore[arg-type]


def test_a_flat_mask_needs_cu_seqlens_where_sequences_matter() -> None:
    assert loss_weights(torch.ones(4), "token-mean").tolist() == [0.25] * 4
    with pytest.raises(ValueError, match="needs cu_seqlens"):
        loss_weights(torch.ones(4), "seq-mean-token-mean")
    with pytest.raises(ValueError, match="run from 0 to num_tokens=4, got 0 to 3"):
        loss_weights(torch.ones(4), "seq-mean-token-mean", cu_seqlens=torch.tensor([0, 3]))
