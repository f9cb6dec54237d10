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

STREAM_BYTES = 64 << 10
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
    if size < STREAM_BYTES or not (destination.is_cpu and source.is_cpu):
        destination.copy_(source)
    else:
        _copy(destination.data_ptr(), source.data_ptr(), size)


def _copy(destination: int, source: int, size: int) -> None:
    loop, parts = _loop(), min(torch.get_num_threads(), size // _PART_BYTES)
    if parts <= 1:
        loop(destination, source, size)
        return
    bounds = [size * part // parts // _LINE_BYTES * _LINE_BYTES for part in range(parts)]
    first, *others = itertools.pairwise([*bounds, size])
    under_way = [_threads().submit(loop, destination + start, source + start, end - start) for start, end in others]
    loop(destination, source, first[1])
    for part in under_way:
        part.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="lightning_rlhf-copy")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process has none of these threads


def _assembly() -> str:
    """Single bytes up to the first whole line of the destination, then turns of whole lines, then single bytes."""
    lines = range(_LINES)
    return "\n".join(
        [
            "define void @copy(ptr noalias %to, ptr noalias %from, i64 %bytes) {",
            "begin:",
            "  %address = ptrtoint ptr %to to i64",
            "  %over = sub i64 0, %address",
            f"  %odd = and i64 %over, {_LINE_BYTES - 1}",
            "  %head = call i64 @llvm.umin.i64(i64 %odd, i64 %bytes)",
            "  %rest = sub i64 %bytes, %head",
            f"  %whole = and i64 %rest, {-_TURN_BYTES}",
            "  %end = add i64 %head, %whole",
            "  br label %head.test",
            *_byte_loop("head", first="0", before="begin", end="%head", then="turn.test"),
            "turn.test:",
            "  %at = phi i64 [%head, %head.test], [%next, %turn]",
            "  %more = icmp ult i64 %at, %end",
            "  br i1 %more, label %turn, label %tail.test",
            "turn:",
            "  %from.at = getelementptr i8, ptr %from, i64 %at",
            "  %to.at = getelementptr i8, ptr %to, i64 %at",
            *(f"  %from{k} = getelementptr <16 x i32>, ptr %from.at, i64 {k}" for k in lines),
            *(f"  %to{k} = getelementptr <16 x i32>, ptr %to.at, i64 {k}" for k in lines),
            *(f"  %line{k} = load <16 x i32>, ptr %from{k}, align 1" for k in lines),
            *(f"  store <16 x i32> %line{k}, ptr %to{k}, align {_LINE_BYTES}, !nontemporal !0" for k in lines),
            f"  %next = add i64 %at, {_TURN_BYTES}",
            "  br label %turn.test",
            *_byte_loop("tail", first="%end", before="turn.test", end="%bytes", then="done"),
            "done:",
            # non-temporal stores are not ordered with those that follow, such as that of a counter
            "  fence seq_cst",
            "  ret void",
            "}",
            "declare i64 @llvm.umin.i64(i64, i64)",
            "!0 = !{i32 1}",
        ]
    )


def _byte_loop(name: str, *, first: str, before: str, end: str, then: str) -> list[str]:
    return [
        f"{name}.test:",
        f"  %{name}.at = phi i64 [{first}, %{before}], [%{name}.next, %{name}.byte]",
        f"  %{name}.more = icmp ult i64 %{name}.at, {end}",
        f"  br i1 %{name}.more, label %{name}.byte, label %{then}",
        f"{name}.byte:",
        f"  %{name}.from = getelementptr i8, ptr %from, i64 %{name}.at",
        f"  %{name}.to = getelementptr i8, ptr %to, i64 %{name}.at",
        f"  %{name}.value = load i8, ptr %{name}.from",
        f"  store i8 %{name}.value, ptr %{name}.to",
        f"  %{name}.next = add i64 %{name}.at, 1",
        f"  br label %{name}.test",
    ]


@cache
def _loop() -> Callable[[int, int, int], None]:
    """The compiled loop: destination's address, source's address, bytes. It runs without the interpreter's lock."""
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

    def loop(destination: int, source: int, size: int, *, _memory_of_the_code: object = engine) -> None:
        function(destination, source, size)

    return loop
