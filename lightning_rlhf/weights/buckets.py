"""The bucket codec: named tensors in buffers of one size, and back. Pure: it knows no transport.

A bucket is a buffer and a header. The header lists pieces: which bytes of which tensor lie where. A tensor that fits in
a bucket is never cut, so that a receiver reads it in place; a larger one is spread over as many as it takes. Headers
travel as JSON, never as pickle, and a receiver believes nothing in them that it can check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.weights.checksum import BLOCK_BYTES, RunningChecksum, as_bytes

ALIGNMENT = 64
"""Bytes between the starts of pieces; a whole number of elements of every dtype."""

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
"""The dtypes that travel, by name."""


class BucketError(RuntimeError):
    """A bucket is not what was sent: corrupted, out of order, or inconsistent."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Bytes of one tensor in one bucket.

    Attributes:
        name: the tensor's.
        dtype: its name in `DTYPES`.
        shape: of the whole tensor.
        start: first byte, counted in the tensor.
        place: first byte, counted in the bucket.
        num_bytes: how many.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    place: int
    num_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class BucketHeader:
    """What lies in one bucket.

    Attributes:
        index: its number in this sync, from 0.
        num_bytes: bytes in use.
        checksum: of those bytes (`RunningChecksum`).
        pieces: in the order of the bytes.
    """

    index: int
    num_bytes: int
    checksum: str
    pieces: tuple[Piece, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; a piece is the list of its fields."""
        pieces = [[p.name, p.dtype, list(p.shape), p.start, p.place, p.num_bytes] for p in self.pieces]
        return {"index": self.index, "num_bytes": self.num_bytes, "checksum": self.checksum, "pieces": pieces}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BucketHeader:
        """From what `to_json` gave.

        Raises:
            BucketError: if a field is missing, or a piece lies outside the bucket or its tensor.
        """
        try:
            pieces = tuple(
                Piece(
                    name=str(name),
                    dtype=str(dtype),
                    shape=tuple(int(size) for size in shape),
                    start=int(start),
                    place=int(place),
                    num_bytes=int(num_bytes),
                )
                for name, dtype, shape, start, place, num_bytes in values["pieces"]
            )
            header = cls(
                index=int(values["index"]),
                num_bytes=int(values["num_bytes"]),
                checksum=str(values["checksum"]),
                pieces=pieces,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BucketError(f"A bucket's header cannot be read: {error!r}.") from error
        for piece in pieces:
            if piece.dtype not in DTYPES:
                raise BucketError(f"{piece.name}: dtype {piece.dtype!r} is unknown here; known: {', '.join(DTYPES)}.")
            inside = 0 <= piece.place <= piece.place + piece.num_bytes <= header.num_bytes
            if not inside or not 0 <= piece.start <= piece.start + piece.num_bytes <= piece.tensor_bytes:
                raise BucketError(f"Bucket {header.index}: {piece} lies outside its bucket or its tensor.")
        return header


class BucketPacker:
    """Packs a stream of tensors.

    The first buckets are closed early, at an eighth, a quarter and a half of the size, so that receivers start early.

    Args:
        bucket_bytes: size of a bucket; at least `ALIGNMENT`, rounded down to a multiple of it.
        buffer: gives the next buffer to fill, ``uint8 [>= bucket_bytes]``; may wait until one is free.
        sampled: whether checksums read part of the bytes only; the reader must do the same.
    """

    def __init__(self, *, bucket_bytes: int, buffer: Callable[[], Tensor], sampled: bool = False) -> None:
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket takes at least {ALIGNMENT} bytes.")
        self.bucket_bytes = bucket_bytes // ALIGNMENT * ALIGNMENT
        self._next_buffer = buffer
        self._sampled = sampled
        self._index = 0
        self._open: _OpenBucket | None = None

    def pack(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[BucketHeader]:
        """Yields the header of each bucket when its buffer is complete; the caller puts it on its way before going on.

        Raises:
            ValueError: for a name that comes twice, and a tensor that is sparse or of an unknown dtype.
        """
        names: set[str] = set()
        for name, tensor in named_tensors:
            if name in names:
                raise ValueError(f"Weight push: {name!r} comes twice.")
            names.add(name)
            yield from self._add(name, tensor)
        if self._open is not None:
            yield self._close(self._open)

    def _add(self, name: str, tensor: Tensor) -> Iterator[BucketHeader]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(f"{name}: {tensor.layout} of {tensor.dtype} cannot be sent; dense: {', '.join(DTYPES)}.")
        content = as_bytes(tensor)
        size, start = content.numel(), 0
        if self._open is not None and self._open.room(self.bucket_bytes) < size <= self.bucket_bytes:
            yield self._close(self._open)
        while True:
            bucket = self._open = self._open or self._new_bucket()
            count = min(size - start, bucket.room(self.bucket_bytes))
            bucket.put(content[start : start + count], name=name, dtype=dtype, shape=tuple(tensor.shape), start=start)
            start += count
            if bucket.room(self._enough()) <= 0:
                yield self._close(bucket)
            if start == size:
                return

    def _enough(self) -> int:
        return min(self.bucket_bytes, self.bucket_bytes >> max(0, 3 - self._index))

    def _new_bucket(self) -> _OpenBucket:
        return _OpenBucket(self._next_buffer(), sampled=self._sampled, turn=self._index)

    def _close(self, bucket: _OpenBucket) -> BucketHeader:
        self._open = None
        self._index += 1
        checksum = bucket.checksum.finish(bucket.filled)
        return BucketHeader(
            index=self._index - 1, num_bytes=bucket.filled, checksum=checksum, pieces=tuple(bucket.pieces)
        )


class _OpenBucket:
    def __init__(self, buffer: Tensor, *, sampled: bool, turn: int) -> None:
        self.buffer = buffer
        # summed while they are in the cache still; without a full checksum there is no reason to copy in parts
        self._copied_at_once = (1 << 62) if sampled else BLOCK_BYTES
        self.filled = 0
        self.pieces: list[Piece] = []
        self.checksum = RunningChecksum(buffer, sampled=sampled, turn=turn)

    def room(self, bucket_bytes: int) -> int:
        return bucket_bytes - self._place()

    def _place(self) -> int:
        return -(-self.filled // ALIGNMENT) * ALIGNMENT

    def put(self, content: Tensor, *, name: str, dtype: str, shape: tuple[int, ...], start: int) -> None:
        place, size = self._place(), content.numel()
        self.buffer[self.filled : place].zero_()  # the gap is part of the checksum
        for done in range(0, size, self._copied_at_once):
            count = min(self._copied_at_once, size - done)
            self.buffer[place + done : place + done + count].copy_(content[done : done + count])
            self.checksum.advance(place + done + count)
        self.filled = place + size
        self.pieces.append(Piece(name=name, dtype=dtype, shape=shape, start=start, place=place, num_bytes=size))


class BucketReader:
    """Takes the buckets of a sync apart, in their order; `restart` makes it ready for the next sync.

    A tensor that is spread over buckets is put together in one piece of memory, which is kept: to take a fresh one for
    each sync costs more than the copy into it.

    Args:
        sampled: as in the `BucketPacker`.
        before_reuse: called before that memory is written again.
    """

    def __init__(self, *, sampled: bool = False, before_reuse: Callable[[], None] = lambda: None) -> None:
        self._sampled = sampled
        self._before_reuse = before_reuse
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.restart()

    def restart(self) -> None:
        """Expects the first bucket of a sync."""
        self._expected = 0
        self._names: set[str] = set()
        self._unfinished: dict[str, tuple[Tensor, int]] = {}

    def read(self, header: BucketHeader, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that are complete with this bucket.

        A tensor is valid until the next one is asked for, and then until ``before_reuse`` is called or the buffer is
        written again.

        Args:
            header: the bucket's.
            buffer: ``uint8 [>= header.num_bytes]``.

        Raises:
            BucketError: if the bucket is not the next one, its checksum does not hold, or its pieces do not fit those
                before.
        """
        if header.index != self._expected:
            raise BucketError(f"Bucket {header.index} arrived, but bucket {self._expected} comes next.")
        self._expected += 1
        found = RunningChecksum(buffer, sampled=self._sampled, turn=header.index).finish(header.num_bytes)
        if found != header.checksum:
            names = [piece.name for piece in header.pieces]
            raise BucketError(
                f"Bucket {header.index} is corrupted: checksum {found}, but {header.checksum} was sent "
                f"({header.num_bytes} bytes, {names[:3]} ...). The weights must not be used."
            )
        for piece in header.pieces:
            tensor = self._take(piece, buffer[piece.place : piece.place + piece.num_bytes])
            if tensor is not None:
                yield piece.name, tensor

    def _take(self, piece: Piece, content: Tensor) -> Tensor | None:
        whole, filled = self._unfinished.pop(piece.name, (None, 0))
        if piece.start != filled or piece.name in self._names:
            raise BucketError(f"{piece.name}: bytes from {piece.start} on arrived, but {filled} come next.")
        if piece.num_bytes < piece.tensor_bytes:
            if whole is None:
                whole = self._memory_for(piece, content)
            if whole.numel() != piece.tensor_bytes:
                raise BucketError(f"{piece.name}: its pieces disagree on its size.")
            whole[filled : filled + piece.num_bytes].copy_(content)
            filled += piece.num_bytes
            if filled < piece.tensor_bytes:
                self._unfinished[piece.name] = (whole, filled)
                return None
            content = whole
        self._names.add(piece.name)
        return content.view(DTYPES[piece.dtype]).view(piece.shape)

    def _memory_for(self, piece: Piece, content: Tensor) -> Tensor:
        if self._unfinished:
            raise BucketError(f"{piece.name} begins before {sorted(self._unfinished)} is complete.")
        self._before_reuse()
        if self._memory.numel() < piece.tensor_bytes or self._memory.device != content.device:
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go of the smaller one first
            self._memory = torch.empty(piece.tensor_bytes, dtype=torch.uint8, device=content.device)
        return self._memory[: piece.tensor_bytes]

    def finish(self, num_buckets: int) -> None:
        """Checks that all came.

        Raises:
            BucketError: if buckets are missing, or the rest of a tensor is.
        """
        if self._expected != num_buckets or self._unfinished:
            raise BucketError(
                f"{self._expected} of {num_buckets} buckets arrived; incomplete tensors: {sorted(self._unfinished)}."
            )
