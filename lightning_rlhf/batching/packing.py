"""Between the flat layout that travels and the padded one that some mathematics reads better; exact both ways."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_to_padded(values: Tensor, cu_seqlens: Tensor, pad_value: float | int | bool) -> Tensor:
    """Sequences back to back become rows, padded on the right to the longest.

    Args:
        values: ``[num_tokens, ...]``, any dtype; gradients flow through.
        cu_seqlens: ``[B+1]``, where each sequence starts, from 0 to ``num_tokens``.
        pad_value: what fills the rest of each row.

    Returns:
        ``[B, T, ...]``, ``T`` the longest sequence (0 for a batch without tokens).

    Raises:
        ValueError: if ``cu_seqlens`` does not fit ``values``.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens must have shape [B+1] with B >= 0, got {tuple(cu_seqlens.shape)}.")
    lengths = cu_seqlens.diff().to(values.device)
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != values.shape[0] or bool((lengths < 0).any()):
        raise ValueError(
            f"cu_seqlens must rise from 0 to num_tokens={values.shape[0]}, got {int(cu_seqlens[0])} to "
            f"{int(cu_seqlens[-1])}."
        )
    real = real_slots(lengths)
    padded = values.new_full((*real.shape, *values.shape[1:]), pad_value)
    return padded.masked_scatter(real.reshape(*real.shape, *[1] * (values.ndim - 1)), values)


def padded_to_flat(padded: Tensor, lengths: Tensor) -> Tensor:
    """Rows padded on the right become sequences back to back.

    Args:
        padded: ``[B, T, ...]``, any dtype; gradients flow through, 0 on the padding.
        lengths: ``[B]`` int, tokens of each row.

    Returns:
        ``[num_tokens, ...]``.

    Raises:
        ValueError: if ``lengths`` is not ``[B]`` within 0 to ``T``.
    """
    if padded.ndim < 2 or lengths.shape != padded.shape[:1]:
        raise ValueError(
            f"Expected padded [B, T, ...] and lengths [B], got {tuple(padded.shape)} and {tuple(lengths.shape)}."
        )
    width = padded.shape[1]
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > width):
        raise ValueError(
            f"lengths must lie within 0 and the padded width {width}, got {int(lengths.min())} to {int(lengths.max())}."
        )
    return padded[real_slots(lengths.to(padded.device), width)]


def real_slots(lengths: Tensor, width: int | None = None) -> Tensor:
    """``[B, T]`` bool, True where a right-padded row holds a token.

    Args:
        lengths: ``[B]`` int.
        width: ``T``; None: the longest.
    """
    if width is None:
        width = int(lengths.max()) if lengths.numel() else 0
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]
