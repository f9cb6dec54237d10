"""Causal attention over sequences that lie back to back, each seeing itself alone.

Registered with transformers under ``PACKED_ATTENTION``. The name is absent from transformers' mask interface, so no
attention mask is ever built; where sequences begin comes along as the keyword ``packed_layout``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED_ATTENTION = "lightning_rlhf_packed"

_MAX_PADDING = 1.25
"""A group may hold this many times its real tokens; attention is a small part of a step, so this costs little."""


class PackedLayout:
    """Where the sequences of one micro-batch lie. Built once per forward, read by every layer.

    A plain object, so that FSDP2 hands it through to the layers untouched.

    Args:
        cu_seqlens: ``[B+1]`` int64, see ``FlatBatch``.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        self.cu_seqlens = cu_seqlens
        self._starts = cu_seqlens.tolist()
        self.num_tokens: int = self._starts[-1]
        self.max_length: int = max((b - a for a, b in zip(self._starts, self._starts[1:], strict=False)), default=0)

    @cached_property
    def cu_seqlens_int32(self) -> Tensor:
        """``cu_seqlens`` as flash kernels take it."""
        return self.cu_seqlens.to(torch.int32)

    @cached_property
    def position_ids(self) -> Tensor:
        """``[num_tokens]`` int64: each token's index in its own sequence."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens.diff())
        return torch.arange(self.num_tokens, device=self.cu_seqlens.device) - starts

    @cached_property
    def groups(self) -> list[tuple[int, int, Tensor]]:
        """Sequences of similar length, padded on the right to one.

        One call for each sequence is slow for many short ones, and one for all wastes compute on padding. Under a
        causal mask a real token never sees what stands to its right, so padding changes nothing.

        Returns:
            Per group the number of sequences ``n``, their padded length ``L``, and ``[n * L]`` int64: which token
            stands at each place; any token at a place of padding.
        """
        spans = sorted(
            ((b - a, a) for a, b in zip(self._starts, self._starts[1:], strict=False) if b > a),
            key=lambda s: (-s[0], s[1]),
        )
        found: list[list[tuple[int, int]]] = []
        real = 0
        for length, start in spans:
            if found and found[-1][0][0] * (len(found[-1]) + 1) <= _MAX_PADDING * (real + length):
                found[-1].append((length, start))
                real += length
            else:
                found.append([(length, start)])
                real = length
        return [self._group(spans) for spans in found]

    def _group(self, spans: list[tuple[int, int]]) -> tuple[int, int, Tensor]:
        device = self.cu_seqlens.device
        longest = spans[0][0]
        lengths = torch.tensor([length for length, _ in spans], device=device)
        starts = torch.tensor([start for _, start in spans], device=device)
        offsets = torch.arange(longest, device=device).minimum(lengths[:, None] - 1)
        return len(spans), longest, (starts[:, None] + offsets).reshape(-1)

    @cached_property
    def places(self) -> Tensor:
        """``[num_tokens]`` int64: where each token stands in the groups' padded places, all one after another."""
        places = torch.empty(self.num_tokens, dtype=torch.int64, device=self.cu_seqlens.device)
        first = 0
        for num_sequences, longest, tokens in self.groups:
            # padding repeats a sequence's last token: written from the last place to the first, its real place stays
            table = tokens.view(num_sequences, longest)
            is_real = torch.ones_like(table, dtype=torch.bool)
            is_real[:, 1:] = table[:, 1:] != table[:, :-1]
            real = is_real.reshape(-1)
            places[tokens[real]] = first + torch.arange(len(tokens), device=tokens.device)[real]
            first += len(tokens)
        return places


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal self-attention within each sequence, in the form that transformers' AttentionInterface calls.

    In half precision on CUDA it is one variable-length flash kernel; elsewhere one SDPA call per group of sequences of
    similar length. Key and value heads are shared by query heads in the kernels, never repeated in memory.

    Args:
        module: the attention layer; names itself in errors.
        query: ``[1, num_heads, num_tokens, head_dim]``, rotary embedding applied.
        key: ``[1, num_kv_heads, num_tokens, head_dim]``.
        value: as ``key``.
        attention_mask: must be None.
        packed_layout: where the sequences lie.
        scaling: of the scores; None: ``head_dim ** -0.5``.
        dropout: probability of dropping a score.
        sliding_window: tokens, itself included, that a token sees; None: all before it.
        softcap: not supported.
        s_aux: attention sinks; not supported.
        position_bias: not supported.
        is_causal: must not be False.

    Returns:
        ``[1, num_tokens, num_heads, head_dim]``, and None for the weights.

    Raises:
        RuntimeError: if called without a layout: the model was not called through its engine.
        NotImplementedError: for a kind of attention that this does not compute.
    """
    if packed_layout is None:
        raise RuntimeError(
            f"{type(module).__name__} uses packed attention and needs the batch's layout. Call the model through its "
            f"engine; for anything else set another implementation with model.set_attn_implementation('sdpa')."
        )
    asked = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias, "attention_mask": attention_mask}
    unsupported = [name for name, given in asked.items() if given is not None]
    if unsupported or is_causal is False:
        raise NotImplementedError(
            f"{type(module).__name__} asks for {', '.join(unsupported) or 'attention that is not causal'}, which "
            f"packed attention does not compute. Use a model with plain causal attention."
        )
    grouped_heads = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0:
        attended = _flash(query, key, value, packed_layout, scaling, sliding_window, grouped_heads)
    else:
        attended = _grouped_sdpa(query, key, value, packed_layout, scaling, dropout, sliding_window, grouped_heads)
    return attended[None], None


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
    grouped_heads: bool,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    attended = varlen_attn(
        query,
        key,
        value,
        layout.cu_seqlens_int32,
        layout.cu_seqlens_int32,
        layout.max_length,
        layout.max_length,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=grouped_heads,
    )
    return cast(Tensor, attended)


def _grouped_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    grouped_heads: bool,
) -> Tensor:
    dtype = query.dtype
    if not query.is_cuda and dtype in (torch.bfloat16, torch.float16):
        # PyTorch's CPU kernel takes three times as long for its backward in half precision as in fp32
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [num_tokens, heads, head_dim]
    outputs = []
    for num_sequences, longest, tokens in layout.groups:
        padded = [
            states[tokens].unflatten(0, (num_sequences, longest)).transpose(1, 2) for states in (query, key, value)
        ]
        band = None
        if sliding_window is not None and longest > sliding_window:
            ones = torch.ones(longest, longest, dtype=torch.bool, device=query.device)
            band = ones.tril() & ones.triu(1 - sliding_window)
        attended = F.scaled_dot_product_attention(
            padded[0],
            padded[1],
            padded[2],
            attn_mask=band,
            dropout_p=dropout,
            is_causal=band is None,
            scale=scaling,
            enable_gqa=grouped_heads,
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[layout.places].to(dtype)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
