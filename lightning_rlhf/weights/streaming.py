"""Copies past the cache, for bytes that another process reads next or that nobody reads soon.

A plain store first fetches the line that it is about to overwrite: three bytes cross the memory bus for each byte that
is copied. Non-temporal stores do without: two. When sender and receiver copy at the same time, as over shared memory,
the bus is what bounds them. The C library has such a copy, but begins with it at the size of the whole cache, which no
tensor reaches, and torch has none; so the loop is written here in LLVM's assembly and compiled when first used, in less
than a tenth of a second.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

STREAM_BYTES = 256 << 10
"""Smaller copies stay in the cache, where plain stores are as fast."""
_PART_BYTES = 4 << 20  # worth a thread of its own: a third of a millisecond
_LINE_BYTES = 64
_LINES = 4  # of a turn of the loop
_TURN_BYTES = _LINES * _LINE_BYTES


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
    if size < STREAM_BYTES or {destination.device.type, source.device.type} != {"cpu"}:
        destination.copy_(source)
        return
    first = -destination.data_ptr() % _LINE_BYTES
    turns = (size - first) // _TURN_BYTES
    end = first + turns * _TURN_BYTES
    for start, stop in ((0, first), (end, size)):
        if start < stop:
            destination[start:stop].copy_(source[start:stop])
    _copy_turns(destination.data_ptr() + first, source.data_ptr() + first, turns)


def _copy_turns(destination: int, source: int, turns: int) -> None:
    """Copies ``turns * _TURN_BYTES`` bytes between two addresses, the first one that of a whole line."""
    parts = max(1, min(torch.get_num_threads(), turns * _TURN_BYTES // _PART_BYTES))
    bounds = itertools.pairwise(turns * part // parts for part in range(parts + 1))
    first, *others = [
        (destination + start * _TURN_BYTES, source + start * _TURN_BYTES, end - start) for start, end in bounds
    ]
    loop = _loop()
    under_way = [_threads().submit(loop, *part) for part in others]
    loop(*first)
    for part in under_way:
        part.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="lightning_rlhf-copy")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process has none of these threads


def _assembly() -> str:
    lines = range(_LINES)
    return "\n".join(
        [
            "define void @copy(ptr noalias %to, ptr noalias %from, i64 %turns) {",
            "begin:",
            "  %lines = mul i64 %turns, " + str(_LINES),
            "  %none = icmp eq i64 %lines, 0",
            "  br i1 %none, label %end, label %turn",
            "turn:",
            "  %line0 = phi i64 [0, %begin], [%next, %turn]",
            *(f"  %line{k} = add i64 %line0, {k}" for k in lines[1:]),
            *(f"  %from{k} = getelementptr <16 x i32>, ptr %from, i64 %line{k}" for k in lines),
            *(f"  %to{k} = getelementptr <16 x i32>, ptr %to, i64 %line{k}" for k in lines),
            *(f"  %bytes{k} = load <16 x i32>, ptr %from{k}, align 1" for k in lines),
            *(f"  store <16 x i32> %bytes{k}, ptr %to{k}, align {_LINE_BYTES}, !nontemporal !0" for k in lines),
            f"  %next = add i64 %line0, {_LINES}",
            "  %more = icmp ult i64 %next, %lines",
            "  br i1 %more, label %turn, label %end",
            "end:",
            # non-temporal stores are not ordered with those that follow, such as that of a counter
            "  fence seq_cst",
            "  ret void",
            "}",
            "!0 = !{i32 1}",
        ]
    )


@cache
def _loop() -> Callable[[int, int, int], None]:
    """The compiled loop: destination's address, source's address, turns. It runs without the interpreter's lock."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten()
    )
    module = llvm.parse_assembly(_assembly())
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
        engine.get_function_address("copy")
    )

    def loop(destination: int, source: int, turns: int, *, _memory_of_the_code: object = engine) -> None:
        function(destination, source, turns)

    return loop
