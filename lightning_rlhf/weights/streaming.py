"""Copies past the cache, for bytes that another process reads next or that nobody reads soon.

A plain store first fetches the line that it is about to overwrite: three bytes cross the memory bus for each byte that
is copied. Non-temporal stores do without: two. When sender and receiver copy at the same time, as over shared memory,
the bus is what bounds them. The C library has such a copy, but begins with it at the size of the whole cache, which no
tensor reaches, and torch has none; so the loop is ours (`copy_loops`).
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from lightning_rlhf.weights.copy_loops import LINE_BYTES, copy_loop

STREAM_BYTES = 64 << 10
"""Smaller copies stay in the cache, where plain stores are as fast."""
_PART_BYTES = 4 << 20  # worth a thread of its own: a third of a millisecond


def copy_bytes(destination: Tensor, source: Tensor) -> None:
    """``destination[:] = source``; when it returns, the bytes are where every process sees them.

    Large copies in host memory go past the cache, on as many threads as torch uses.

    Args:
        destination: ``uint8 [n]``, dense, on any device.
        source: ``uint8 [n]``, dense, not overlapping it.

    Raises:
        ValueError: if they differ in size, or are no dense bytes.
    """
    for tensor in (destination, source):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"Expected dense uint8 [n], got {tensor.dtype} {list(tensor.shape)} {tensor.stride()}.")
    size = source.numel()
    if destination.numel() != size:
        raise ValueError(f"{size} bytes do not fit {destination.numel()}.")
    if size < STREAM_BYTES or not (destination.is_cpu and source.is_cpu):
        destination.copy_(source)
    else:
        _copy(destination.data_ptr(), source.data_ptr(), size)


def _copy(destination: int, source: int, size: int) -> None:
    loop, parts = copy_loop(), min(torch.get_num_threads(), size // _PART_BYTES)
    if parts <= 1:
        loop(destination, source, size)
        return
    bounds = [size * part // parts // LINE_BYTES * LINE_BYTES for part in range(parts)]
    first, *others = itertools.pairwise([*bounds, size])
    under_way = [_threads().submit(loop, destination + start, source + start, end - start) for start, end in others]
    loop(destination, source, first[1])
    for part in under_way:
        part.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="lightning_rlhf-copy")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process has none of these threads
