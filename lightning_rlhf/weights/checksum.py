"""Checksums of bytes that move: cheap enough to run over every byte, at several times the speed of a copy.

Bytes are read as 64-bit words in rows of 1021; each row is summed (modulo 2**64), and the sums are hashed. A changed
bit changes its row's sum. Rows are no multiple of a memory page, so that a page which is missing, stale, or in
another page's place changes sums as well. Two words exchanged within one row go unseen: no transport does that.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

WORD = 8
ROW_BYTES = 1021 * WORD
BLOCK_ROWS = 64
BLOCK_BYTES = BLOCK_ROWS * ROW_BYTES
"""Copied and summed at a time: half a megabyte, so that the sum reads what the copy has left in the cache."""


SAMPLED_EVERY = 16
"""A sampled checksum reads the first words of one row of this many; a buffer of up to one block is read whole."""
SAMPLED_WORDS = 128


class RunningChecksum:
    """Sums a buffer while it is being filled from the front.

    Args:
        buffer: ``uint8 [n]``, its start aligned to 8 bytes.
        sampled: read `SAMPLED_WORDS` of one row of `SAMPLED_EVERY`, which ones being decided by ``turn``. What is
            missing, stale or in another's place is found if it is 129 KiB long; a single wrong byte is found in one of
            128 cases.
        turn: the bucket's number.
    """

    def __init__(self, buffer: Tensor, *, sampled: bool = False, turn: int = 0) -> None:
        self._buffer = buffer
        self._sampled = sampled
        self._turn = turn
        self._done = 0
        self._sums: list[Tensor] = []

    def advance(self, filled: int) -> None:
        """Sums the whole blocks of the first ``filled`` bytes that were not summed yet."""
        if not self._sampled:
            self._sum_rows((filled - self._done) // BLOCK_BYTES * BLOCK_ROWS)

    def finish(self, num_bytes: int) -> str:
        """The checksum of the first ``num_bytes`` bytes, 16 hexadecimal digits."""
        rows = (num_bytes - self._done) // ROW_BYTES
        if self._sampled and rows > BLOCK_ROWS:
            first = self._turn % SAMPLED_EVERY
            shape = (len(range(first, rows, SAMPLED_EVERY)), SAMPLED_WORDS)
            words = self._buffer[first * ROW_BYTES : rows * ROW_BYTES].view(torch.int64)
            self._sums.append(words.as_strided(shape, (SAMPLED_EVERY * ROW_BYTES // WORD, 1)).sum(1))
            self._done = rows * ROW_BYTES
        else:
            self._sum_rows(rows)
        end = num_bytes // WORD * WORD
        if self._done < end:
            self._sums.append(self._buffer[self._done : end].view(torch.int64).sum(0, keepdim=True))
        parts = self._sums if end == num_bytes else [*self._sums, self._buffer[end:num_bytes]]
        content = b"".join(part.cpu().numpy().tobytes() for part in parts)
        return hashlib.blake2b(content + num_bytes.to_bytes(8, "little"), digest_size=8).hexdigest()

    def _sum_rows(self, rows: int) -> None:
        if rows <= 0:
            return
        end = self._done + rows * ROW_BYTES
        for start in range(self._done, end, BLOCK_BYTES):
            block = self._buffer[start : min(start + BLOCK_BYTES, end)]
            self._sums.append(block.view(torch.int64).view(-1, ROW_BYTES // WORD).sum(1))
        self._done = end


def checksum_of(tensor: Tensor) -> str:
    """The checksum of a tensor's elements as they lie in memory, whatever its dtype and shape."""
    flat = as_bytes(tensor)
    if flat.data_ptr() % WORD:
        flat = flat.clone()
    return RunningChecksum(flat).finish(flat.numel())


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as ``uint8 [nbytes]``; no copy if it is contiguous."""
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
