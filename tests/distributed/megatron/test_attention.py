"""Each way of sharing sequences against plain attention, and what the ring holds in memory."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fork import run_distributed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rlhf.engines.megatron import ring_attention
from lightning_rlhf.engines.megatron.attention import AllGatherAttention, PackedCoreAttention, UlyssesAttention
from lightning_rlhf.engines.megatron.backend import choose_backend
from lightning_rlhf.engines.megatron.zigzag import natural_order

KINDS: dict[str, type[PackedCoreAttention]] = {
    "allgather": AllGatherAttention,
    "ulysses": UlyssesAttention,
    "ring": ring_attention.RingAttention,
}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def module(kind: str) -> PackedCoreAttention:
    config, groups = SimpleNamespace(kv_channels=HEAD_DIM), SimpleNamespace(cp=dist.group.WORLD)
    return KINDS[kind](config, 1, None, "self", pg_collection=groups)


def params(lengths: tuple[int, ...]) -> Any:
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return SimpleNamespace(cu_seqlens_q_padded=None, cu_seqlens_q=starts)


def plain(states: list[Tensor], lengths: tuple[int, ...]) -> Tensor:
    """Token by token and head by head."""
    query, key, value = states
    out = torch.zeros_like(query)
    start = 0
    for length in lengths:
        for t in range(start, start + length):
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = key[start : t + 1, group] @ query[t, head] * HEAD_DIM**-0.5
                out[t, head] = scores.softmax(0) @ value[start : t + 1, group]
        start += length
    return out


def states(lengths: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths)

    def draw(heads: int) -> Tensor:
        return torch.randn(total, heads, HEAD_DIM, generator=generator)

    return [draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)], draw(HEADS)


def attend(kind: str, lengths: tuple[int, ...], tile: int) -> float:
    """Largest difference of outputs and gradients from plain attention, over this rank's tokens."""
    ring_attention.TILE = tile
    whole, direction = states(lengths)
    expected_inputs = [one.clone().requires_grad_() for one in whole]
    expected = plain(expected_inputs, lengths)
    (expected * direction).sum().backward()
    _, to_zigzag = natural_order(lengths, dist.get_world_size())
    mine = to_zigzag.chunk(dist.get_world_size())[dist.get_rank()]
    with choose_backend("cpu").active():
        inputs = [one[mine].clone().requires_grad_() for one in whole]
        out = module(kind)(*inputs, None, packed_seq_params=params(lengths))
        (out * direction[mine].flatten(1)).sum().backward()
    pairs = [(out, expected[mine].flatten(1))]
    pairs += [(one.grad, other.grad[mine]) for one, other in zip(inputs, expected_inputs, strict=True)]
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_against_plain_attention(kind: str, ranks: int) -> None:
    for difference in run_distributed(attend, ranks, kind, (16, 8, 24), 3):
        assert difference < 1e-5


def test_lengths_that_do_not_cut_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match=r"padded length \[6, 10\] .* = 4 equal"):
        natural_order((6, 8, 10), 2)


def test_zigzag_by_hand() -> None:
    """One sequence of eight tokens on two ranks: 0 1 6 7 and 2 3 4 5; one of four: 0 3 and 1 2."""
    to_natural, to_zigzag = natural_order((8, 4), 2)
    assert to_zigzag.tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    assert to_zigzag[to_natural].tolist() == list(range(12))


def test_zigzag_of_four_ranks_by_hand() -> None:
    _, to_zigzag = natural_order((16,), 4)
    ranks = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert to_zigzag.view(4, 4).tolist() == ranks


class Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else [out]
        self.elements = max([self.elements, *(one.numel() for one in made if isinstance(one, Tensor))])
        return out


def memory(kind: str, local: int) -> tuple[int, int]:
    """Largest tensor of forward and backward, and elements kept for the backward, with ``local`` tokens a rank."""
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    inputs = [torch.randn(local, heads, HEAD_DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    with choose_backend("cpu").active():
        attention, sequences = module(kind), params((local * dist.get_world_size(),))
        with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            attention(*inputs, None, packed_seq_params=sequences).sum().backward()
    return largest.elements, kept


def test_the_ring_holds_as_much_for_two_ranks_as_for_four() -> None:
    two, four = (run_distributed(memory, ranks, "ring", 32)[0] for ranks in (2, 4))
    assert two == four


def test_gathered_keys_and_values_grow_with_the_ranks() -> None:
    """Negative control of the measure."""
    two, four = (run_distributed(memory, ranks, "allgather", 32)[0] for ranks in (2, 4))
    assert four[0] > 1.9 * two[0]
    assert four[1] > 1.5 * two[1]
