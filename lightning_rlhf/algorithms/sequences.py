"""Sums over sequences in either layout: padded ``[B, T]``, or flat ``[num_tokens]`` with ``cu_seqlens [B+1]``.

Both layouts add the same numbers in the same order (an off-mask slot adds an exact zero), so a result does not depend
on the layout, on padding or on packing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_sequences(values: Tensor, cu_seqlens: Tensor | None) -> int:
    """Number of sequences ``B`` in ``values``.

    Args:
        values: padded ``[B, T]``, or flat ``[num_tokens]``.
        cu_seqlens: ``[B+1]`` for the flat layout, None for the padded one.

    Raises:
        ValueError: if layout and ``cu_seqlens`` do not belong together.
    """
    shape = tuple(values.shape)
    if values.ndim == 2:
        if cu_seqlens is not None:
            raise ValueError(
                f"cu_seqlens belongs to flat tensors [num_tokens], got it with a padded one of shape {shape}."
            )
        return values.shape[0]
    if values.ndim != 1:
        raise ValueError(f"Expected padded [B, T] or flat [num_tokens], got shape {shape}.")
    if cu_seqlens is None:
        raise ValueError(f"A flat tensor of shape {shape} needs cu_seqlens [B+1] to tell its sequences apart.")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens must have shape [B+1] with B >= 0, got {tuple(cu_seqlens.shape)}.")
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != values.numel():
        raise ValueError(
            f"cu_seqlens must run from 0 to num_tokens={values.numel()}, "
            f"got {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}."
        )
    return cu_seqlens.numel() - 1


def sequence_ids(values: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The sequence of each slot, in the shape of ``values``, int64."""
    count = num_sequences(values, cu_seqlens)
    rows = torch.arange(count, device=values.device)
    if cu_seqlens is None:
        return rows[:, None].expand(values.shape)
    return torch.repeat_interleave(rows, cu_seqlens.diff().to(values.device))


def sequence_sums(values: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Sum of ``values`` where ``mask``, per sequence, differentiable.

    Args:
        values: padded ``[B, T]``, or flat ``[num_tokens]``; what stands off the mask is never read.
        mask: bool, in the shape of ``values``.
        cu_seqlens: ``[B+1]`` for the flat layout.

    Returns:
        ``[B]`` float64: a sum of thousands of fp32 terms keeps its digits.
    """
    ids = sequence_ids(values, cu_seqlens).reshape(-1)
    kept = values.masked_fill(~mask, 0).double().reshape(-1)
    return kept.new_zeros(num_sequences(values, cu_seqlens)).index_add(0, ids, kept)


def sequence_means(values: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Mean of ``values`` where ``mask``, per sequence: ``[B]`` float64, 0 for a sequence without a masked-in slot."""
    counts = sequence_sums(torch.ones_like(values, dtype=torch.float64), mask, cu_seqlens)
    return sequence_sums(values, mask, cu_seqlens) / counts.clamp(min=1)


def spread(per_sequence: Tensor, like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Each sequence's value at each of its slots, in the shape of ``like`` and the dtype of ``per_sequence``.

    Raises:
        ValueError: if ``per_sequence`` does not have one value per sequence.
    """
    count = num_sequences(like, cu_seqlens)
    if per_sequence.shape != (count,):
        raise ValueError(f"Expected one value per sequence, shape [{count}], got {tuple(per_sequence.shape)}.")
    return per_sequence[sequence_ids(like, cu_seqlens)]
