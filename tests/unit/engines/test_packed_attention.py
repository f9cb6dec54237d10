"""Packed attention against each sequence attended to alone, with an explicit mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from lightning_rlhf.engines.packed_attention import as_values, packed_attention
from lightning_rlhf.engines.packed_layout import PackedLayout


def _states(lengths: list[int], heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, count, sum(lengths), head_dim, generator=draw, dtype=torch.float64).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )


def _layout(lengths: list[int]) -> PackedLayout:
    return PackedLayout(torch.tensor([0, *lengths]).cumsum(0))


def _alone(states: tuple[Tensor, ...], lengths: list[int], window: int | None = None) -> Tensor:
    """Softmax over an explicit mask, one sequence and one head after the other."""
    query, key, value = states
    outputs = []
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        heads = []
        for head in range(query.shape[1]):
            shared = head * key.shape[1] // query.shape[1]
            scores = query[0, head, rows] @ key[0, shared, rows].t() * query.shape[-1] ** -0.5
            behind = torch.arange(length)[:, None] - torch.arange(length)
            hidden = (behind < 0) | (behind >= (window or length))
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[0, shared, rows])
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)[None]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[5], [3, 1, 7, 7, 2, 40], [1, 1], [2, 0, 3]], ids=str)
def test_outputs_and_gradients_are_those_of_each_sequence_alone(lengths: list[int], window: int | None) -> None:
    states = _states(lengths)
    packed, weights = packed_attention(
        nn.Identity(), *states, None, packed_layout=_layout(lengths), sliding_window=window
    )
    expected = _alone(states, lengths, window)
    assert weights is None
    torch.testing.assert_close(packed, expected)
    direction = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad((packed * direction).sum(), states),
        torch.autograd.grad((expected * direction).sum(), states),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_scaling_is_passed_on() -> None:
    states = _states([4])
    once, _ = packed_attention(nn.Identity(), *states, None, packed_layout=_layout([4]), scaling=0.5 * 8**-0.5)
    halved = _alone((states[0] * 0.5, *states[1:]), [4])
    torch.testing.assert_close(once, halved)


def test_positions_restart_and_lengths_are_known() -> None:
    layout = _layout([3, 1, 2])
    assert layout.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert layout.max_length == 3
    assert layout.num_tokens == 6


def test_sequences_of_similar_length_share_a_call() -> None:
    layout = _layout([60, 55, 50, 58, 500, 3])
    assert [(group.num_sequences, group.length) for group in layout.groups] == [(1, 500), (4, 60), (1, 3)]


@pytest.mark.parametrize("seed", range(10))
def test_groups_hold_every_token_once_and_little_padding(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 200, (50,), generator=draw).tolist()
    layout = _layout(lengths)
    places = torch.cat([group.tokens for group in layout.groups])
    assert len(places) <= 1.25 * sum(lengths)
    assert torch.equal(places[layout.places], torch.arange(sum(lengths)))
    assert len(layout.groups) <= 25


def test_compute_grows_with_the_sequences_and_not_with_the_packed_length() -> None:
    lengths = [64] * 16
    states = _states(lengths)
    with FlopCounterMode(display=False) as counter:
        packed_attention(nn.Identity(), *states, None, packed_layout=_layout(lengths))
    # two products of 64 x 64 x 8 for each of 16 sequences and 4 heads
    assert counter.get_total_flops() <= 2 * 2 * 16 * 4 * 64 * 64 * 8


def test_what_it_does_not_compute_is_refused() -> None:
    states = _states([4])
    with pytest.raises(RuntimeError, match=r"needs the batch's layout.*set_attn_implementation\('sdpa'\)"):
        packed_attention(nn.Identity(), *states, None)
    for name, value in (("softcap", 30.0), ("s_aux", torch.zeros(4)), ("position_bias", torch.zeros(4, 4))):
        with pytest.raises(NotImplementedError, match=name):
            packed_attention(nn.Identity(), *states, None, packed_layout=_layout([4]), **{name: value})
    with pytest.raises(NotImplementedError, match="attention_mask"):
        packed_attention(nn.Identity(), *states, torch.zeros(4, 4), packed_layout=_layout([4]))
    with pytest.raises(NotImplementedError, match="not causal"):
        packed_attention(nn.Identity(), *states, None, packed_layout=_layout([4]), is_causal=False)


def test_cuda_kernels_get_queries_and_keys_in_the_dtype_of_values() -> None:
    query, key, value = (states.float() for states in _states([3, 4]))
    half = value.bfloat16()
    with pytest.raises(RuntimeError, match="same dtype"):
        scaled_dot_product_attention(query, key, half, enable_gqa=True)
    query, key = as_values(query, key, half)
    assert scaled_dot_product_attention(query, key, half, enable_gqa=True).dtype is torch.bfloat16
