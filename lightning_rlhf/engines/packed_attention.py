"""Causal attention over sequences that lie back to back, each seeing itself and what it follows alone.

Registered with transformers under ``PACKED_ATTENTION``. The name is absent from transformers' mask interface, so no
attention mask is ever built; where sequences begin comes along as the keyword ``packed_layout``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lightning_rlhf.engines.packed_layout import PackedLayout

PACKED_ATTENTION = "lightning_rlhf_packed"


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
    """Causal attention of each sequence to itself and what it follows, in the form that transformers calls.

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
    if value.is_cuda:
        query, key = as_values(query, key, value)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0:
        attended = _flash(query, key, value, packed_layout, scaling, sliding_window, grouped_heads)
    else:
        attended = _grouped_sdpa(query, key, value, packed_layout, scaling, dropout, sliding_window, grouped_heads)
    return attended[None], None


def as_values(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys in the dtype of values: under autocast the rotary embedding leaves them in fp32.

    No CUDA kernel takes several dtypes; on a CPU all are fp32 in the end.
    """
    return query.to(value.dtype), key.to(value.dtype)


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

    index, key_starts, longest = layout.keys
    query, key, value = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    if index is not None:
        key, value = key.index_select(0, index), value.index_select(0, index)
    # with fewer queries than keys the causal rule holds from the bottom right: the last query sees the last key
    attended = varlen_attn(
        query,
        key,
        value,
        layout.cu_seqlens_int32,
        key_starts,
        layout.max_length,
        longest,
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
    dtype = value.dtype  # that of queries and keys may be fp32
    if not query.is_cuda and dtype in (torch.bfloat16, torch.float16):
        # PyTorch's CPU kernel takes three times as long for its backward in half precision as in fp32
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [num_tokens, heads, head_dim]
    outputs = []
    for group in layout.groups:
        keys = group.key_tokens()
        padded = [
            states.index_select(0, tokens).unflatten(0, (group.num_sequences, -1)).transpose(1, 2)
            for states, tokens in ((query, group.tokens), (key, keys), (value, keys))
        ]
        mask = group.mask(sliding_window)
        with torch.autocast(query.device.type, enabled=False):  # which would cast back what was cast above
            attended = F.scaled_dot_product_attention(
                padded[0],
                padded[1],
                padded[2],
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=grouped_heads,
            )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.places).to(dtype)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
