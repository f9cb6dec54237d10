"""Ulysses: ranks hold slices of one token stream, and change to holding heads for the time of each attention.

Everything outside attention acts on tokens one by one, so each of ``sp`` ranks does it for its own slice. Attention
needs all tokens of a sequence, but its heads know nothing of each other: one all-to-all gives each rank all tokens of
``heads / sp`` heads, and another brings its own tokens back (DeepSpeed-Ulysses, arXiv:2309.14509).

Registered with transformers under ``ULYSSES_ATTENTION``; without a ``SlicedLayout`` it is plain packed attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lightning_rlhf.engines.packed_attention import packed_attention
from lightning_rlhf.engines.packed_layout import PackedLayout

ULYSSES_ATTENTION = "lightning_rlhf_ulysses"


def check_heads(*, num_heads: int, num_kv_heads: int, sp_size: int) -> None:
    """Refuses a number of ranks that the heads cannot be dealt to.

    Query heads are cut, never copied. Key and value heads are cut as well, or, where there are fewer than ranks, each
    is copied to ``sp_size / num_kv_heads`` ranks; any other ratio would hand every rank parts of several heads.

    Raises:
        ValueError: with the numbers, and those that would fit.
    """
    fitting = [n for n in range(1, num_heads + 1) if _heads_fit(num_heads, num_kv_heads, n)]
    if not _heads_fit(num_heads, num_kv_heads, sp_size):
        raise ValueError(
            f"sp_size={sp_size} does not fit a model with {num_heads} attention heads and {num_kv_heads} key-value "
            f"heads: sp_size must divide {num_heads}, and divide {num_kv_heads} or be a multiple of it. This model "
            f"takes sp_size {', '.join(map(str, fitting))}."
        )


def _heads_fit(num_heads: int, num_kv_heads: int, sp_size: int) -> bool:
    return num_heads % sp_size == 0 and (num_kv_heads % sp_size == 0 or sp_size % num_kv_heads == 0)


class SlicedLayout(PackedLayout):
    """Where the sequences lie in a stream that ``size`` ranks hold slice by slice.

    The stream is padded to a multiple of ``size``; the padding is a sequence of its own at the end: no token sees it.

    Args:
        cu_seqlens: ``[B+1]`` int64 of the real sequences.
        group: the ranks, in the order of their slices.
    """

    def __init__(self, cu_seqlens: Tensor, *, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        super().__init__(pad_to_multiple(cu_seqlens, self.size))


def pad_to_multiple(cu_seqlens: Tensor, multiple: int) -> Tensor:
    """``[B+1]`` or ``[B+2]`` int64: the sequences and, if their tokens do not divide, one more that fills up."""
    padding = -int(cu_seqlens[-1]) % multiple
    return torch.cat([cu_seqlens, cu_seqlens[-1:] + padding]) if padding else cu_seqlens


@dataclass(frozen=True, kw_only=True)
class TokenSlice:
    """One rank's part of a padded stream, all fields ``[num_padded_tokens / size]``.

    Attributes:
        tokens: int64, 0 at padding.
        position_ids: int64, each token's index in its own sequence.
        labels: int64, the token that follows in the same sequence, wherever it is held; 0 where there is none.
        scored: bool, whether the label's log-prob is read.
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    scored: Tensor


def cut_slice(tokens: Tensor, layout: PackedLayout, score_mask: Tensor, *, rank: int, size: int) -> TokenSlice:
    """Cuts a rank's part; labels and their mask are shifted before, so that none is lost or invented at a border.

    Args:
        tokens: ``[num_tokens]`` int64, unpadded.
        layout: of the stream padded to a multiple of ``size``.
        score_mask: ``[num_tokens]`` bool, tokens whose log-probs are read.
        rank: which part.
        size: number of parts.
    """
    padding = layout.num_tokens - len(tokens)
    tokens, score_mask = F.pad(tokens, (0, padding)), F.pad(score_mask, (0, padding))
    followed = F.pad(layout.position_ids[1:] > 0, (0, 1))
    labels = torch.where(followed, tokens.roll(-1), 0)
    scored = followed & score_mask.roll(-1)
    part = slice(rank * (layout.num_tokens // size), (rank + 1) * (layout.num_tokens // size))
    return TokenSlice(
        tokens=tokens[part], position_ids=layout.position_ids[part], labels=labels[part], scored=scored[part]
    )


class _Exchange(torch.autograd.Function):
    """``output[i]`` on rank ``j`` is ``input[j]`` of rank ``i``; a permutation that is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return exchange(grads[0], ctx.group), None


def exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all of ``[size, ...]``: one part for each rank out, one from each rank in."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def tokens_to_heads(states: Tensor, layout: SlicedLayout) -> Tensor:
    """``[1, heads, num_tokens / size, head_dim]`` on each rank becomes ``[1, heads / size, num_tokens, head_dim]``."""
    parts = states[0].unflatten(0, (layout.size, -1))
    received: Tensor = _Exchange.apply(parts, layout.group)  # type: ignore[no-untyped-call]
    return received.transpose(0, 1).flatten(1, 2)[None]


def heads_to_tokens(states: Tensor, layout: SlicedLayout) -> Tensor:
    """``[1, num_tokens, heads / size, head_dim]`` on each rank becomes ``[1, num_tokens / size, heads, head_dim]``."""
    parts = states[0].unflatten(0, (layout.size, -1))
    received: Tensor = _Exchange.apply(parts, layout.group)  # type: ignore[no-untyped-call]
    return received.transpose(0, 1).flatten(1, 2)[None]


class _GatherSlices(torch.autograd.Function):
    """Concatenates all ranks' slices.

    Every rank goes on to compute the same whole loss ``L`` from the gathered values ``y``, so each holds the whole
    ``dL/dy``, and its own slice's gradient is a slice of it. Summing over ranks first, as the transpose of a gather
    would, counts ``L`` once for each rank: gradients ``size`` times too large.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, layout: SlicedLayout) -> Tensor:
        ctx.layout = layout
        gathered = values.new_empty((layout.size * len(values), *values.shape[1:]))
        dist.all_gather_single(gathered, values.contiguous(), group=layout.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return own_slice(grads[0], ctx.layout), None


def own_slice(values: Tensor, layout: SlicedLayout) -> Tensor:
    """``[num_tokens / size, ...]``: this rank's part of what all ranks hold whole."""
    return values.chunk(layout.size)[layout.rank]


def gather_slices(values: Tensor, layout: SlicedLayout) -> Tensor:
    """``[num_tokens / size, ...]`` of each rank becomes ``[num_tokens, ...]`` on all, for a loss that all compute."""
    gathered: Tensor = _GatherSlices.apply(values, layout)  # type: ignore[no-untyped-call]
    return gathered


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Packed attention over a stream in slices, in the form that transformers' AttentionInterface calls.

    Args:
        module: the attention layer.
        query: ``[1, num_heads, num_tokens / size, head_dim]``, rotary embedding applied.
        key: ``[1, num_kv_heads, num_tokens / size, head_dim]``.
        value: as ``key``.
        attention_mask: must be None.
        packed_layout: a ``SlicedLayout``; any other layout is of a stream that this rank holds whole.
        **kwargs: see ``packed_attention``.

    Returns:
        ``[1, num_tokens / size, num_heads, head_dim]``, and None for the weights.
    """
    if not isinstance(packed_layout, SlicedLayout):
        return packed_attention(module, query, key, value, attention_mask, packed_layout=packed_layout, **kwargs)
    copies = packed_layout.size // math.gcd(key.shape[1], packed_layout.size)
    if copies > 1:
        key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
    query, key, value = (tokens_to_heads(states, packed_layout) for states in (query, key, value))
    attended, _ = packed_attention(module, query, key, value, attention_mask, packed_layout=packed_layout, **kwargs)
    return heads_to_tokens(attended, packed_layout), None


AttentionInterface.register(ULYSSES_ATTENTION, ulysses_attention)
