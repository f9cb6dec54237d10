"""Random sequences of uneven length, flat and padded, for tests of per-token mathematics."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

few_examples = settings(max_examples=15, deadline=None, derandomize=True)
"""Enough to meet empty sequences, all-masked ones and single tokens, in a fraction of a second."""


@dataclass(frozen=True)
class Ragged:
    """Inputs of a policy loss for a few sequences; what stands off the mask is NaN where ``poisoned``."""

    lengths: list[int]
    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()], dtype=torch.int64)

    def slices(self) -> list[slice]:
        starts = self.cu_seqlens.tolist()
        return [slice(a, b) for a, b in itertools.pairwise(starts)]

    def padded(self, values: Tensor, *, width: int, fill: float = 0.0) -> Tensor:
        """Rows by a plain loop."""
        out = torch.full((len(self.lengths), width), fill).to(values.dtype)
        for row, part in enumerate(self.slices()):
            out[row, : part.stop - part.start] = values[part]
        return out

    def poisoned(self) -> Ragged:
        """The same with NaN wherever the mask is False."""
        poison = [t.masked_fill(~self.mask, torch.nan) for t in (self.log_probs, self.old_log_probs, self.advantages)]
        return Ragged(self.lengths, *poison, self.mask)

    def to(self, dtype: torch.dtype) -> Ragged:
        parts = (self.log_probs, self.old_log_probs, self.advantages)
        return Ragged(self.lengths, *(part.to(dtype) for part in parts), self.mask)


@st.composite
def ragged(draw: st.DrawFn, *, min_sequences: int = 1) -> Ragged:
    """Float64 inputs: log-probs that differ enough to be clipped on both sides, advantages of both signs."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=min_sequences, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    total = sum(lengths)
    old = -3 * torch.rand(total, generator=generator, dtype=torch.float64) - 0.01
    new = (old + 0.4 * torch.randn(total, generator=generator, dtype=torch.float64)).clamp(max=-0.001)
    advantages = torch.randn(total, generator=generator, dtype=torch.float64)
    mask = torch.rand(total, generator=generator) < draw(st.sampled_from([0.0, 0.7, 1.0]))
    return Ragged(lengths, new, old, advantages, mask)
