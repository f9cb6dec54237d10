"""Where the tokens of packed sequences lie on the ranks that share them.

A sequence whose padded length is a multiple of ``2 * cp`` is cut into that many equal chunks, and rank ``r`` holds the
chunks ``r`` and ``2 * cp - 1 - r``, one after the other: under a causal mask every rank then has the same work.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def packed_lengths(packed_seq_params: Any) -> tuple[int, ...]:
    """The padded length of each sequence over all context-parallel ranks."""
    starts = packed_seq_params.cu_seqlens_q_padded
    if starts is None:
        starts = packed_seq_params.cu_seqlens_q
    lengths: list[int] = starts.diff().tolist()
    return tuple(lengths)


@lru_cache(maxsize=64)
def natural_order(lengths: tuple[int, ...], cp: int) -> tuple[Tensor, Tensor]:
    """How to undo zigzag order.

    Args:
        lengths: padded length of each sequence, multiples of ``2 * cp``.
        cp: context-parallel ranks.

    Returns:
        ``[sum(lengths)]`` int64: at each place of the natural order, where its token lies when all ranks' tokens stand
        one after another; and the same the other way round.

    Raises:
        ValueError: if a length does not cut into equal chunks.
    """
    uneven = [length for length in lengths if length % (2 * cp)]
    if uneven:
        raise ValueError(
            f"Sequences of padded length {uneven[:5]} do not cut into 2 x context_parallel_size = {2 * cp} equal "
            f"chunks. Pad each to a multiple of {2 * cp}."
        )
    starts = [0, *accumulate(lengths)]
    owned: list[Tensor] = []
    for rank in range(cp):
        for start, length in zip(starts[:-1], lengths, strict=True):
            chunks = torch.arange(start, start + length).view(2 * cp, -1)
            owned += [chunks[rank], chunks[2 * cp - 1 - rank]]
    to_zigzag = torch.cat(owned) if owned else torch.empty(0, dtype=torch.int64)
    return to_zigzag.argsort(), to_zigzag
