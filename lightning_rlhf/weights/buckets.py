"""The bucket codec: named tensors in buffers of one size, and back. Pure: it knows no transport.

A bucket is a buffer and a header. The header lists pieces: which bytes of which tensor lie where. A tensor that fits in
a bucket is never cut, so that a receiver reads it in place; a larger one is spread over as many as it takes. Headers
travel as JSON, never as pickle, and a receiver believes nothing in them that it can check.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lightning_rlhf.weights.bucket_header import DTYPES, BucketError, BucketHeader, Piece
from lightning_rlhf.weights.checksum import BLOCK_BYTES, RunningChecksum, as_bytes
from lightning_rlhf.weights.receiver_memory import ReceiverMemory
from lightning_rlhf.weights.streaming import copy_bytes

ALIGNMENT = 64
"""Bytes between the starts of pieces; a whole number of elements of every dtype."""

_NUMBER_BYTES = 22  # an integer of 64 bits, a comma and a space
_ENTRY_BYTES = 4 * _NUMBER_BYTES  # of a header: start, place, size; dtype and brackets
_LONGEST_ENTRY = 2048


class BucketPacker:
    """Packs a stream of tensors.

    Buckets are filled. The first ones are closed early, at an eighth, a quarter and a half of the size, so that
    receivers start early. With ``enough``, every bucket is closed as soon as it holds that much (the first ones an
    eighth, a quarter and a half of it), and larger tensors are cut into buckets of that size.

    Args:
        bucket_bytes: largest size of a bucket; at least `ALIGNMENT`, rounded down to a multiple of it.
        buffer: called with a size and the bytes of the same tensor that will follow, gives the next buffer to fill,
            ``uint8 [>= size]``; may wait until one is free.
        sampled: whether checksums read part of the bytes only; the reader must do the same.
        enough: closes buckets early.
        header_bytes: closes buckets whose header is about to be longer than this, as JSON.
    """

    def __init__(
        self,
        *,
        bucket_bytes: int,
        buffer: Callable[[int, int], Tensor],
        sampled: bool = False,
        enough: int | None = None,
        header_bytes: int | None = None,
    ) -> None:
        if min(bucket_bytes, enough or bucket_bytes) < ALIGNMENT:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket takes at least {ALIGNMENT} bytes.")
        self.bucket_bytes = bucket_bytes // ALIGNMENT * ALIGNMENT
        self._enough = None if enough is None else min(enough // ALIGNMENT * ALIGNMENT, self.bucket_bytes)
        self._header_bytes = math.inf if header_bytes is None else header_bytes - _LONGEST_ENTRY
        self._next_buffer = buffer
        self._sampled = sampled
        self._index = 0
        self._open: _OpenBucket | None = None

    def pack(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[BucketHeader]:
        """Yields the header of each bucket when its buffer is complete; the caller puts it on its way before going on.

        Raises:
            ValueError: for a name that comes twice, and a tensor that is sparse or of an unknown dtype.
        """
        for name, dtype, tensor in checked(named_tensors):
            yield from self._add(name, dtype, tensor)
        if self._open is not None:
            yield self._close(self._open)

    def _add(self, name: str, dtype: str, tensor: Tensor) -> Iterator[BucketHeader]:
        content = as_bytes(tensor)
        size, start = content.numel(), 0
        alone = self._enough is not None and size > self._enough
        if self._open is not None and (alone or self._open.room() < size <= self.bucket_bytes):
            yield self._close(self._open)
        cut = False
        while True:
            bucket = self._open = self._open or self._new_bucket(size - start)
            count = min(size - start, bucket.room())
            bucket.put(content[start : start + count], name=name, dtype=dtype, shape=tuple(tensor.shape), start=start)
            start += count
            cut = cut or start < size
            # nothing follows the end of a tensor that was cut: the room that was reserved for it ends there
            if self._is_full(bucket) or ((alone or cut) and start == size):
                yield self._close(bucket)
            if start == size:
                return

    def _is_full(self, bucket: _OpenBucket) -> bool:
        full = bucket.size if self._enough else self._early(bucket.size)
        return bucket.room() <= bucket.size - full or bucket.header_bytes > self._header_bytes

    def _early(self, size: int) -> int:
        """Of a bucket's size, the part after which it is closed: receivers wait for the first ones."""
        return size >> max(0, 3 - self._index)

    def _new_bucket(self, first_bytes: int) -> _OpenBucket:
        size = self.bucket_bytes
        if self._enough:
            size = max(ALIGNMENT, self._early(self._enough) // ALIGNMENT * ALIGNMENT)
        buffer = self._next_buffer(size, max(0, first_bytes - size))
        return _OpenBucket(buffer, size, sampled=self._sampled, turn=self._index)

    def _close(self, bucket: _OpenBucket) -> BucketHeader:
        self._open = None
        self._index += 1
        checksum = bucket.checksum.finish(bucket.filled)
        return BucketHeader(
            index=self._index - 1, num_bytes=bucket.filled, checksum=checksum, pieces=tuple(bucket.pieces)
        )


class _OpenBucket:
    def __init__(self, buffer: Tensor, size: int, *, sampled: bool, turn: int) -> None:
        self.buffer = buffer
        self.size = size
        self.header_bytes = 0
        self._sampled = sampled
        self.filled = 0
        self.pieces: list[Piece] = []
        self.checksum = RunningChecksum(buffer, sampled=sampled, turn=turn)

    def room(self) -> int:
        return self.size - self._place()

    def _place(self) -> int:
        return -(-self.filled // ALIGNMENT) * ALIGNMENT

    def put(self, content: Tensor, *, name: str, dtype: str, shape: tuple[int, ...], start: int) -> None:
        place, size = self._place(), content.numel()
        if self.filled < place:
            self.buffer[self.filled : place].zero_()  # the gap is part of the checksum
        if self._sampled:
            copy_bytes(self.buffer[place : place + size], content)
        else:  # in parts, which are summed while they are in the cache still
            for done in range(0, size, BLOCK_BYTES):
                count = min(BLOCK_BYTES, size - done)
                self.buffer[place + done : place + done + count].copy_(content[done : done + count])
                self.checksum.advance(place + done + count)
        self.filled = place + size
        self.pieces.append(Piece(name=name, dtype=dtype, shape=shape, start=start, place=place, num_bytes=size))
        self.header_bytes += len(json.dumps(name)) + _ENTRY_BYTES + _NUMBER_BYTES * len(shape)


def checked(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
    """Gives name, dtype's name in `DTYPES` and tensor.

    Raises:
        ValueError: for a name that comes twice, and a tensor that is sparse or of an unknown dtype.
    """
    names: set[str] = set()
    for name, tensor in named_tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if name in names:
            raise ValueError(f"Weight push: {name!r} comes twice.")
        if dtype not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(f"{name}: {tensor.layout} of {tensor.dtype} cannot be sent; dense: {', '.join(DTYPES)}.")
        names.add(name)
        yield name, dtype, tensor


class BucketReader:
    """Takes the buckets of a sync apart, in their order; `restart` makes it ready for the next sync.

    A tensor that is spread over buckets is put together in memory that is kept. It is not copied if its buckets lie
    back to back.

    Args:
        sampled: as in the `BucketPacker`.
        before_reuse: called before that memory is written again.
        in_place_bytes: the buckets of a tensor of up to this size lie back to back, and stay until it is complete.
    """

    def __init__(
        self, *, sampled: bool = False, before_reuse: Callable[[], None] = lambda: None, in_place_bytes: int = 0
    ) -> None:
        self._sampled = sampled
        self._memory = ReceiverMemory(before_reuse=before_reuse)
        self._in_place_bytes = in_place_bytes
        self.restart()

    def restart(self, destinations: Mapping[str, Tensor] | None = None) -> None:
        """Expects the first bucket of a sync.

        Args:
            destinations: where tensors of these names are put together; those of another dtype or shape, and those that
                are not contiguous, are left alone.
        """
        self._memory.destinations = destinations or {}
        self._in_place = False
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

    @property
    def needs_buffers(self) -> bool:
        """Whether a tensor has begun that is read where its buckets lie: they must stay as they are."""
        return self._in_place and bool(self._unfinished)

    def _take(self, piece: Piece, content: Tensor) -> Tensor | None:
        whole, filled = self._unfinished.pop(piece.name, (None, 0))
        if piece.start != filled or piece.name in self._names:
            raise BucketError(f"{piece.name}: bytes from {piece.start} on arrived, but {filled} come next.")
        destination = self._memory.destination(piece.name, dtype=DTYPES[piece.dtype], shape=piece.shape)
        if piece.num_bytes < piece.tensor_bytes or destination is not None:
            if whole is None:
                whole = self._memory_for(piece, content, destination)
            if whole.numel() != piece.tensor_bytes:
                raise BucketError(f"{piece.name}: its pieces disagree on its size.")
            part = whole[filled : filled + piece.num_bytes]
            if not self._in_place:
                copy_bytes(part, content)
            elif part.data_ptr() != content.data_ptr():
                raise BucketError(f"{piece.name}: its pieces do not lie back to back.")
            filled += piece.num_bytes
            if filled < piece.tensor_bytes:
                self._unfinished[piece.name] = (whole, filled)
                return None
            content = whole
        self._names.add(piece.name)
        return content.view(DTYPES[piece.dtype]).view(piece.shape) if destination is None else destination

    def _memory_for(self, piece: Piece, content: Tensor, destination: Tensor | None) -> Tensor:
        if self._unfinished:
            raise BucketError(f"{piece.name} begins before {sorted(self._unfinished)} is complete.")
        self._in_place = destination is None and piece.tensor_bytes <= self._in_place_bytes
        if destination is not None:
            return as_bytes(destination)
        if self._in_place:
            first, room = content.storage_offset(), content.untyped_storage().nbytes()
            if first + piece.tensor_bytes > room:
                raise BucketError(f"{piece.name}: it begins at byte {first} of {room} and does not fit there.")
            return content.as_strided((piece.tensor_bytes,), (1,))
        return self._memory.kept(piece.tensor_bytes, device=content.device)

    def finish(self, num_buckets: int) -> None:
        """Checks that all came.

        Raises:
            BucketError: if buckets are missing, or the rest of a tensor is.
        """
        if self._expected != num_buckets or self._unfinished:
            raise BucketError(
                f"{self._expected} of {num_buckets} buckets arrived; incomplete tensors: {sorted(self._unfinished)}."
            )
