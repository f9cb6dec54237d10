"""What a bucket's header says, and what a receiver checks in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

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

    @cached_property
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
