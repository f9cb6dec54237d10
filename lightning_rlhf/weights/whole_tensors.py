"""Tensors that travel one by one, whole, from where they are to where they go: no bucket between.

A header is the JSON of name, dtype and shape; a receiver believes nothing in it that it can check.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lightning_rlhf.weights.bucket_header import DTYPES, BucketError
from lightning_rlhf.weights.buckets import checked
from lightning_rlhf.weights.checksum import as_bytes
from lightning_rlhf.weights.receiver_memory import ReceiverMemory


def with_headers(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[bytes, Tensor]]:
    """Header and bytes, ``uint8 [nbytes]`` in host memory, of each tensor.

    Raises:
        ValueError: for a name that comes twice, and a tensor that is sparse or of an unknown dtype.
    """
    for name, dtype, tensor in checked(named_tensors):
        yield json.dumps([name, dtype, list(tensor.shape)]).encode(), as_bytes(tensor.cpu())


class WholeTensorReader:
    """Finds memory for each tensor: its destination, or memory that is kept from sync to sync.

    Args:
        before_reuse: called before kept memory is written again.
    """

    def __init__(self, *, before_reuse: Callable[[], None]) -> None:
        self._memory = ReceiverMemory(before_reuse=before_reuse)
        self.restart({})

    def restart(self, destinations: Mapping[str, Tensor]) -> None:
        """Expects the first tensor of a sync.

        Args:
            destinations: where tensors of these names go; those of another dtype or shape, on another device, and those
                that are not contiguous, are left alone.
        """
        self._memory.destinations = destinations
        self._names: set[str] = set()

    def landing(self, header: bytes) -> tuple[str, Tensor, Tensor]:
        """Name of the tensor that comes next, itself, and the same memory as ``uint8 [nbytes]``, to be filled.

        Raises:
            BucketError: if the header cannot be read, or the tensor came before.
        """
        try:
            name, dtype, shape = json.loads(header)
            name, dtype, shape = str(name), str(dtype), tuple(int(size) for size in shape)
        except (TypeError, ValueError) as error:
            raise BucketError(f"A tensor's header cannot be read: {error!r}.") from error
        if dtype not in DTYPES or min(shape, default=0) < 0:
            raise BucketError(f"{name}: {dtype!r} {list(shape)} is unknown here; known: {', '.join(DTYPES)}.")
        if name in self._names:
            raise BucketError(f"{name} came twice.")
        self._names.add(name)
        destination = self._memory.destination(name, dtype=DTYPES[dtype], shape=shape)
        if destination is None or not destination.is_cpu:
            content = self._memory.kept(math.prod(shape) * DTYPES[dtype].itemsize, device=torch.device("cpu"))
            return name, content.view(DTYPES[dtype]).view(shape), content
        return name, destination, as_bytes(destination)

    def finish(self, num_tensors: int) -> None:
        """Checks that all came.

        Raises:
            BucketError: if tensors are missing.
        """
        if len(self._names) != num_tensors:
            raise BucketError(f"{len(self._names)} of {num_tensors} tensors arrived.")
