"""The token stream of a micro-batch in which a beginning that several sequences share stands once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlhf.batching.shared_prompts import SharedPrefix
from lightning_rlhf.engines.packed_layout import PackedLayout


@dataclass(frozen=True)
class SharedStream:
    """Which tokens of a micro-batch are computed, and where the state of each token is found.

    A plain object, so that FSDP2 hands it to the model untouched.

    Attributes:
        kept: ``[num_computed]`` int64, index of each computed token in the micro-batch.
        places: ``[num_tokens]`` int64, where in the stream each token's state is; equal for tokens that are shared.
        layout: of the stream.
    """

    kept: Tensor
    places: Tensor
    layout: PackedLayout


def shared_stream(cu_seqlens: Tensor, shared: Sequence[SharedPrefix]) -> SharedStream:
    """Lays sequences out, each shared beginning before the first of its sequences.

    Args:
        cu_seqlens: ``[B+1]`` int64, where each sequence of the micro-batch begins.
        shared: which of them share what.
    """
    starts = cu_seqlens.tolist()
    prefix_of = {row: prefix for prefix in shared for row in prefix.rows}
    stream = _Stream()
    places = []
    laid: dict[int, int] = {}  # by the first of its rows, where a beginning stands
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        prefix = prefix_of.get(row)
        length = 0 if prefix is None else prefix.length
        first = 0
        if prefix is not None:
            if row == prefix.rows[0]:
                laid[row] = stream.add(start, length)
            first = laid[prefix.rows[0]]
            places.append(torch.arange(first, first + length))
        own = stream.add(start + length, end - start - length, prefix=(first, length))
        places.append(torch.arange(own, own + end - start - length))
    device = cu_seqlens.device
    return SharedStream(
        kept=torch.cat(stream.kept).to(device),
        places=torch.cat(places).to(device),
        layout=PackedLayout(torch.tensor(stream.ends, device=device), stream.prefixes),
    )


class _Stream:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.ends = [0]
        self.prefixes: list[tuple[int, int]] = []

    def add(self, start: int, length: int, *, prefix: tuple[int, int] = (0, 0)) -> int:
        """Appends tokens of the micro-batch as a sequence of its own, and says where it begins."""
        place = self.ends[-1]
        if length:  # a sequence that is all shared has nothing of its own
            self.kept.append(torch.arange(start, start + length))
            self.ends.append(place + length)
            self.prefixes.append(prefix)
        return place
