"""Where the sequences of a micro-batch lie in its token stream, and which of them attend in one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

_MAX_PADDING = 1.25
"""A group may hold this many times its real tokens; attention is a small part of a step, so this costs little."""


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences of similar length that one call attends.

    Attributes:
        num_sequences: how many, ``n``.
        length: that they are padded to, ``L``.
        tokens: ``[n * L]`` int64, which token stands at each place; a sequence's last one at its padding.
        prefix_length: of the tokens that each of them follows, ``P``, the same for all.
        prefix_tokens: ``[n * P]`` int64, which these are.
    """

    num_sequences: int
    length: int
    tokens: Tensor
    prefix_length: int
    prefix_tokens: Tensor

    def key_tokens(self) -> Tensor:
        """``[n * (P + L)]`` int64: what each sequence attends to, in order."""
        if self.prefix_length == 0:
            return self.tokens
        own = self.tokens.view(self.num_sequences, self.length)
        return torch.cat([self.prefix_tokens.view(self.num_sequences, -1), own], dim=1).reshape(-1)

    def mask(self, window: int | None) -> Tensor | None:
        """``[L, P + L]`` bool, which key each token sees; None if that is plainly causal."""
        num_keys = self.prefix_length + self.length
        windowed = window is not None and num_keys > window
        if self.prefix_length == 0 and not windowed:
            return None
        seen = torch.ones(self.length, num_keys, dtype=torch.bool, device=self.tokens.device).tril(self.prefix_length)
        return seen.triu(self.prefix_length + 1 - window) if windowed and window is not None else seen


class PackedLayout:
    """Where the sequences of one micro-batch lie. Built once per forward, read by every layer.

    A sequence may follow tokens that lie elsewhere in the stream, as a response follows a prompt that several share: it
    sees those, and itself.

    A plain object, so that FSDP2 hands it through to the layers untouched.

    Args:
        cu_seqlens: ``[B+1]`` int64, see ``FlatBatch``.
        prefixes: per sequence, where the tokens that it follows start in the stream, and their number; None for none.
    """

    def __init__(self, cu_seqlens: Tensor, prefixes: Sequence[tuple[int, int]] | None = None) -> None:
        self.cu_seqlens = cu_seqlens
        self._starts = cu_seqlens.tolist()
        self._prefixes = prefixes
        self.num_tokens: int = self._starts[-1]
        self.max_length: int = max((b - a for a, b in itertools.pairwise(self._starts)), default=0)

    @cached_property
    def cu_seqlens_int32(self) -> Tensor:
        """``cu_seqlens`` as flash kernels take it."""
        return self.cu_seqlens.to(torch.int32)

    @cached_property
    def position_ids(self) -> Tensor:
        """``[num_tokens]`` int64: each token's index in its own sequence, what that follows included."""
        device = self.cu_seqlens.device
        shifts = self.cu_seqlens[:-1]
        if self._prefixes is not None:
            shifts = shifts - torch.tensor([length for _, length in self._prefixes], device=device)
        return torch.arange(self.num_tokens, device=device) - torch.repeat_interleave(shifts, self.cu_seqlens.diff())

    @cached_property
    def keys(self) -> tuple[Tensor | None, Tensor, int]:
        """The stream that attention reads keys and values from, sequence after sequence, each behind what it follows.

        Returns:
            ``[num_keys]`` int64, which token stands at each place (None: the tokens as they are), ``[B+1]`` int32,
            where each sequence begins, and the length of the longest.
        """
        if self._prefixes is None:
            return None, self.cu_seqlens_int32, self.max_length
        spans = list(zip(self._prefixes, itertools.pairwise(self._starts), strict=True))
        index = [torch.arange(first, last) for (a, n), (b, c) in spans for first, last in ((a, a + n), (b, c))]
        lengths = torch.tensor([0, *(n + c - b for (_, n), (b, c) in spans)])
        device = self.cu_seqlens.device
        starts = lengths.cumsum(0).to(device=device, dtype=torch.int32)
        return torch.cat(index).to(device), starts, int(lengths.max())

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """Sequences of similar length, behind as many tokens each, padded on the right to one length.

        One call for each sequence is slow for many short ones, and one for all wastes compute on padding. Under a
        causal mask a real token never sees what stands to its right, so padding changes nothing.
        """
        prefixes = self._prefixes or [(0, 0)] * (len(self._starts) - 1)
        spans = sorted(
            (-n, a - b, a, first) for (first, n), (a, b) in zip(prefixes, itertools.pairwise(self._starts), strict=True)
        )
        found: list[list[_Span]] = []
        real = 0
        for negative_prefix, negative_length, start, prefix_start in spans:
            span = _Span(start, -negative_length, prefix_start, -negative_prefix)
            if span.length == 0:
                continue
            first = found[-1][0] if found else None
            if (
                first is not None
                and first.prefix_length == span.prefix_length
                and first.length * (len(found[-1]) + 1) <= _MAX_PADDING * (real + span.length)
            ):
                found[-1].append(span)
                real += span.length
            else:
                found.append([span])
                real = span.length
        return [_group(spans, self.cu_seqlens.device) for spans in found]

    @cached_property
    def places(self) -> Tensor:
        """``[num_tokens]`` int64: where each token stands in the groups' padded places, all one after another."""
        places = torch.empty(self.num_tokens, dtype=torch.int64, device=self.cu_seqlens.device)
        first = 0
        for group in self.groups:
            # padding repeats a sequence's last token: written from the last place to the first, its real place stays
            table = group.tokens.view(group.num_sequences, group.length)
            is_real = torch.ones_like(table, dtype=torch.bool)
            is_real[:, 1:] = table[:, 1:] != table[:, :-1]
            real = is_real.reshape(-1)
            places[group.tokens[real]] = first + torch.arange(len(real), device=real.device)[real]
            first += len(real)
        return places


class _Span(NamedTuple):
    start: int
    length: int
    prefix_start: int
    prefix_length: int


def _group(spans: list[_Span], device: torch.device) -> AttentionGroup:
    longest, prefix_length = spans[0].length, spans[0].prefix_length
    lengths, starts, prefix_starts = (
        torch.tensor(values, device=device)[:, None]
        for values in zip(*((span.length, span.start, span.prefix_start) for span in spans), strict=True)
    )
    offsets = torch.arange(longest, device=device).minimum(lengths - 1)
    before = torch.arange(prefix_length, device=device)
    return AttentionGroup(
        num_sequences=len(spans),
        length=longest,
        tokens=(starts + offsets).reshape(-1),
        prefix_length=prefix_length,
        prefix_tokens=(prefix_starts + before).reshape(-1),
    )
