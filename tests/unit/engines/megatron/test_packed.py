"""Packed micro-batches of one context-parallel rank: hand numbers, and there and back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.fork import run_distributed
from torch import Tensor

from lightning_rlhf.engines.megatron.packed import PackedMicroBatch, alignment, gather_for_all, pack, zigzag


def _packed(lengths: list[int], size: int, multiple: int) -> tuple[list[PackedMicroBatch], Tensor, Tensor]:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.arange(100, 100 + int(cu_seqlens[-1]))
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[cu_seqlens[:-1][torch.tensor(lengths) > 0]] = False
    ranks = [pack(tokens, cu_seqlens, mask, multiple=multiple, rank=rank, size=size) for rank in range(size)]
    return ranks, tokens, mask


@pytest.mark.parametrize(
    ("length", "size", "expected"),
    [
        (8, 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (16, 4, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        (6, 1, [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_c07_zigzag_is_not_contiguous(length: int, size: int, expected: list[list[int]]) -> None:
    ranks, _, _ = _packed([length], size, 2 * size if size > 1 else 1)
    assert [packed.position_ids[0].tolist() for packed in ranks] == expected
    assert [(packed.tokens[0] - 100).tolist() for packed in ranks] == expected


def test_c07_six_tokens_on_two_ranks_are_padded_to_eight() -> None:
    ranks, _, _ = _packed([6], 2, 4)
    assert [packed.position_ids[0].tolist() for packed in ranks] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert ranks[0].tokens[0].tolist() == [100, 101, 0, 0]
    # the token at position 5, the last, predicts nothing; nor does padding
    assert [packed.scored.tolist() for packed in ranks] == [[0, 1], [0, 1, 2]]
    assert [packed.labels.tolist() for packed in ranks] == [[101, 102], [103, 104, 105]]
    assert ranks[0].cu_seqlens_padded.tolist() == [0, 8]


@pytest.mark.parametrize(("size", "multiple"), [(1, 1), (1, 4), (2, 4), (2, 8), (4, 8)])
@pytest.mark.parametrize("lengths", [[5, 30, 8, 1, 3], [7], [], [3, 0, 2]])
def test_scores_come_back_at_the_tokens_that_they_are_of(lengths: list[int], size: int, multiple: int) -> None:
    """Each position scores its label: after the way back a token's score is the token itself."""
    ranks, tokens, mask = _packed(lengths, size, multiple)
    locals_ = [packed.tokens.new_zeros(packed.num_local) for packed in ranks]
    for packed, local in zip(ranks, locals_, strict=True):
        assert packed.num_local * size % multiple == 0
        assert bool((packed.cu_seqlens_padded.diff() % multiple == 0).all())
        local[packed.scored] = packed.labels
    whole = torch.cat(locals_)
    for packed in ranks:
        found = torch.where(packed.asked, whole[packed.predictors], 0)
        assert torch.equal(found, torch.where(mask, tokens, 0))
    assert sum(len(packed.labels) for packed in ranks) == int(mask.sum())


def test_alignment() -> None:
    assert alignment(tensor_parallel_size=4, context_parallel_size=1, sequence_parallel=False) == 1
    assert alignment(tensor_parallel_size=4, context_parallel_size=1, sequence_parallel=True) == 4
    assert alignment(tensor_parallel_size=1, context_parallel_size=2, sequence_parallel=False) == 4
    assert alignment(tensor_parallel_size=2, context_parallel_size=2, sequence_parallel=True) == 8


def test_zigzag_refuses_lengths_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"into 4 pieces, got \[6\]"):
        zigzag(torch.tensor([6]), 2)


def _c03() -> tuple[float, float]:
    """Rank 0 has five valid tokens of loss 2, rank 1 one of loss 8; each is its weight times a parameter of 1."""
    group = dist.group.WORLD
    assert group is not None
    parameter = torch.ones((), requires_grad=True)
    own = torch.tensor([2.0] * 5 + [0.0]) if dist.get_rank() == 0 else torch.tensor([0.0] * 5 + [8.0])
    valid = torch.tensor([True] * 5 + [False] * 6 + [True])
    terms = gather_for_all(own * parameter, group)
    loss = (terms * (valid / valid.sum())).sum()
    loss.backward()
    assert parameter.grad is not None
    gradient = parameter.grad.clone()
    dist.all_reduce(gradient)
    return float(loss), float(gradient)


def test_c03_each_token_counts_once_over_context_parallel_ranks() -> None:
    """3.0 for loss and gradient: not 5.0, the mean of means, and not 1.5 or 6.0, tokens counted once a rank."""
    assert run_distributed(_c03, 2) == [(pytest.approx(3.0), pytest.approx(3.0))] * 2


def _columns() -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    tokens, cu_seqlens = torch.arange(6), torch.tensor([0, 6])
    mask = torch.tensor([False, False, True, True, True, True])
    packed = pack(tokens, cu_seqlens, mask, multiple=4, rank=dist.get_rank(), size=2)
    return packed.at_tokens(packed.labels[:, None].float(), group=group)[:, 0].tolist()


def test_at_tokens_over_ranks() -> None:
    assert run_distributed(_columns, 2) == [[0.0, 0.0, 2.0, 3.0, 4.0, 5.0]] * 2
