"""Portions: as many tensors as fit in one piece of the sender's memory, in the layout of MoonshotAI's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.weights.bucket_header import DTYPES, BucketError
from lightning_rlhf.weights.checksum import RunningChecksum, as_bytes

ALIGNMENT = 256
"""Bytes between the starts of tensors: `checkpoint_engine.pin_memory` aligns them so."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a portion.

    Attributes:
        name: the tensor's.
        dtype: its name in `DTYPES`.
        shape: its shape.
        checksum: of its bytes (`RunningChecksum`).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize

    @property
    def room(self) -> int:
        """Bytes up to the start of the next tensor."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What lies in the sender's memory, from its start on.

    Attributes:
        entries: in the order of the bytes; none of them empty.
    """

    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        return sum(entry.room for entry in self.entries)

    def to_json(self) -> list[Any]:
        """As plain JSON values; an entry is the list of its fields."""
        return [[entry.name, entry.dtype, list(entry.shape), entry.checksum] for entry in self.entries]

    @classmethod
    def from_json(cls, values: Any) -> Portion:
        """From what `to_json` gave.

        Raises:
            BucketError: if it cannot be read, or names a dtype that is unknown here.
        """
        try:
            entries = tuple(
                Entry(name=str(name), dtype=str(dtype), shape=tuple(int(n) for n in shape), checksum=str(checksum))
                for name, dtype, shape, checksum in values
            )
        except (TypeError, ValueError) as error:
            raise BucketError(f"A portion's contents cannot be read: {error!r}.") from error
        for entry in entries:
            if entry.dtype not in DTYPES or min(entry.shape, default=1) < 0:
                raise BucketError(f"{entry.name}: {entry.dtype!r} {entry.shape} is no tensor that is known here.")
        return cls(entries=entries)

    def check(self, name: str, tensor: Tensor, *, turn: int, sampled: bool) -> None:
        """Compares a tensor that has arrived with what was sent.

        Raises:
            BucketError: if it is another one, or its bytes differ.
        """
        entry = self.entries[turn] if turn < len(self.entries) else None
        if entry is None or (name, tuple(tensor.shape), tensor.dtype) != (entry.name, entry.shape, DTYPES[entry.dtype]):
            raise BucketError(f"{name} arrived, but {None if entry is None else entry.name} comes next.")
        found = RunningChecksum(as_bytes(tensor), sampled=sampled, turn=turn).finish(entry.num_bytes)
        if found != entry.checksum:
            raise BucketError(
                f"{name} is corrupted: checksum {found}, but {entry.checksum} was sent ({entry.num_bytes} bytes). The "
                "weights must not be used."
            )


class PortionPacker:
    """Packs a stream of tensors into portions.

    Args:
        portion_bytes: size of a portion; one tensor that is larger is a portion of its own.
        memory: gives memory of at least so many bytes, ``uint8``, in place of the last one.
        sampled: whether checksums read part of the bytes only; the receiver must do the same.
    """

    def __init__(self, *, portion_bytes: int, memory: Callable[[int], Tensor], sampled: bool) -> None:
        self._portion_bytes = portion_bytes
        self._memory = memory
        self._sampled = sampled
        self.empty: list[Entry] = []
        """Tensors without an element, seen so far: they are in no portion."""

    def pack(self, named_tensors: Iterator[tuple[str, Tensor]]) -> Iterator[Portion]:
        """Yields each portion when the memory holds it; the memory is filled again when the next one is asked for.

        Raises:
            ValueError: for a name that comes twice, and a tensor that is sparse or of an unknown dtype.
        """
        names: set[str] = set()
        entries: list[Entry] = []
        filled = 0
        for name, tensor in named_tensors:
            if name in names:
                raise ValueError(f"Weight push: {name!r} comes twice.")
            names.add(name)
            entry = _entry(name, tensor)
            if not entry.num_bytes:
                self.empty.append(entry)
                continue
            if entries and filled + entry.room > self._portion_bytes:
                yield Portion(entries=tuple(entries))
                entries, filled = [], 0
            place = self._memory(max(self._portion_bytes, entry.room))[filled : filled + entry.room]
            entries.append(self._fill(entry, tensor, place, turn=len(entries)))
            filled += entry.room
        if entries:
            yield Portion(entries=tuple(entries))

    def _fill(self, entry: Entry, tensor: Tensor, place: Tensor, *, turn: int) -> Entry:
        place[: entry.num_bytes].copy_(as_bytes(tensor))
        place[entry.num_bytes :].zero_()
        checksum = RunningChecksum(place, sampled=self._sampled, turn=turn).finish(entry.num_bytes)
        return Entry(name=entry.name, dtype=entry.dtype, shape=entry.shape, checksum=checksum)


def _entry(name: str, tensor: Tensor) -> Entry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided:
        raise ValueError(f"{name}: {tensor.layout} of {tensor.dtype} cannot be sent; dense: {', '.join(DTYPES)}.")
    return Entry(name=name, dtype=dtype, shape=tuple(tensor.shape), checksum="")


def upstream_metas(portion: Portion, *, pointer: int, store_address: str) -> Mapping[str, Any]:
    """The same as the package writes it: `checkpoint_engine.data_types.MemoryBufferMetaList`, as plain values.

    Args:
        portion: what the memory holds.
        pointer: where the memory begins, in the sender's process.
        store_address: ``host:port`` of the sender's peer-to-peer store; empty without one.
    """
    metas = [
        {"name": e.name, "dtype": f"torch.{e.dtype}", "shape": list(e.shape), "aligned_size": e.room}
        for e in portion.entries
    ]
    buffers = [{"metas": metas, "ptr": pointer, "size": portion.num_bytes}]
    return {"p2p_store_addr": store_address, "rdma_device": "", "memory_buffer_metas_list": buffers}
