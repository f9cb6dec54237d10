"""The loops that move bytes, in LLVM's assembly, compiled when first used, in less than a tenth of a second.

Two things can be said in no library that is at hand: a store that goes past the cache, and copies that follow another
process, by a counter, without coming back to the interpreter for each stretch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

LINE_BYTES = 64
"""Of a cache."""
COUNTER_STRIDE = 2 * LINE_BYTES
"""Bytes between the counters of different processes: two lines, since processors fetch lines in pairs."""
SUMMED_WHOLE_BYTES = 64 << 10
SUMMED_END_BYTES = 512

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's fraction, as a signed word
_LINES = 4  # of a turn of the loop
_TURN_BYTES = _LINES * LINE_BYTES
_LOOKS = 20  # at the other's counter, about a microsecond: the other may need this core


def copy_assembly(name: str, *, past_cache: bool) -> str:
    """``name(to, from, bytes)``: single bytes up to the first whole line of the destination, whole lines, single bytes.

    Past the cache, it ends with a fence: such stores are not ordered with those that follow, as that of a counter.
    """
    lines = range(_LINES)
    hint = ", !nontemporal !0" if past_cache else ""
    return "\n".join(
        [
            f"define void @{name}(ptr noalias %to, ptr noalias %from, i64 %bytes) {{",
            "begin:",
            "  %address = ptrtoint ptr %to to i64",
            "  %over = sub i64 0, %address",
            f"  %odd = and i64 %over, {LINE_BYTES - 1}",
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
            *(f"  store <16 x i32> %line{k}, ptr %to{k}, align {LINE_BYTES}{hint}" for k in lines),
            f"  %next = add i64 %at, {_TURN_BYTES}",
            "  br label %turn.test",
            *_byte_loop("tail", first="%end", before="turn.test", end="%bytes", then="done"),
            "done:",
            *(["  fence seq_cst"] if past_cache else []),
            "  ret void",
            "}",
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


def _sum_assembly() -> str:
    """``sum(from, bytes)``: of 64-bit words, modulo 2**64, and of the bytes that are left."""
    return """
define i64 @sum(ptr %from, i64 %bytes) {
begin:
  %end = and i64 %bytes, -8
  br label %word.test
word.test:
  %at = phi i64 [0, %begin], [%next, %word]
  %total = phi i64 [0, %begin], [%added, %word]
  %more = icmp ult i64 %at, %end
  br i1 %more, label %word, label %byte.test
word:
  %word.at = getelementptr i8, ptr %from, i64 %at
  %value = load i64, ptr %word.at, align 1
  %added = add i64 %total, %value
  %next = add i64 %at, 8
  br label %word.test
byte.test:
  %byte = phi i64 [%end, %word.test], [%byte.next, %byte.add]
  %total.byte = phi i64 [%total, %word.test], [%byte.added, %byte.add]
  %byte.more = icmp ult i64 %byte, %bytes
  br i1 %byte.more, label %byte.add, label %done
byte.add:
  %byte.at = getelementptr i8, ptr %from, i64 %byte
  %small = load i8, ptr %byte.at
  %wide = zext i8 %small to i64
  %byte.added = add i64 %total.byte, %wide
  %byte.next = add i64 %byte, 1
  br label %byte.test
done:
  ret i64 %total.byte
}
"""


def _sample_assembly() -> str:
    """``sample(from, bytes, state)``: the state with the sums of both ends mixed in, or of all if it is not much.

    To multiply by an odd number loses nothing: states that differ go on to differ, and the order counts.
    """
    return f"""
define i64 @sample(ptr %from, i64 %bytes, i64 %state) {{
  %little = icmp ule i64 %bytes, {SUMMED_WHOLE_BYTES}
  %first = select i1 %little, i64 %bytes, i64 {SUMMED_END_BYTES}
  %rest = sub i64 %bytes, %first
  %second = call i64 @llvm.umin.i64(i64 %rest, i64 {SUMMED_END_BYTES})
  %second.place = sub i64 %bytes, %second
  %second.at = getelementptr i8, ptr %from, i64 %second.place
  %sum.first = call i64 @sum(ptr %from, i64 %first)
  %sum.second = call i64 @sum(ptr %second.at, i64 %second)
  %with.first = add i64 %state, %sum.first
  %mixed = mul i64 %with.first, {_ODD}
  %with.second = add i64 %mixed, %sum.second
  %mixed.again = mul i64 %with.second, {_ODD}
  ret i64 %mixed.again
}}
"""


def _pass_assembly() -> str:
    """``pass(...)``, for x86; see `pass_loop`.

    Each chunk waits until the lowest of the others' counters, plus ``ahead``, has reached the chunk's end, is copied,
    and then counted. The counters are positions in the stream, which only grow. A chunk is sampled where it comes from,
    before and after it is copied: what is late is not there yet, or what is early has come too soon.
    """
    return f"""
define i64 @pass(ptr %mine, ptr %others, i64 %count, i64 %ahead, ptr %ring, i64 %ring.bytes, i64 %chunk.bytes,
                 ptr %state.at, ptr %memory, i64 %bytes, i64 %writes, i64 %past.cache) {{
begin:
  %first = load atomic i64, ptr %mine monotonic, align 8
  %state.before = load i64, ptr %state.at
  %is.writer = icmp ne i64 %writes, 0
  %is.past = icmp ne i64 %past.cache, 0
  br label %next
next:
  %position = phi i64 [%first, %begin], [%position.after, %sampled]
  %done = phi i64 [0, %begin], [%done.after, %sampled]
  %state = phi i64 [%state.before, %begin], [%state.after, %sampled]
  %left = sub i64 %bytes, %done
  %finished = icmp eq i64 %left, 0
  br i1 %finished, label %end, label %plan
plan:
  %in.chunk = urem i64 %position, %chunk.bytes
  %to.border = sub i64 %chunk.bytes, %in.chunk
  %want = call i64 @llvm.umin.i64(i64 %left, i64 %to.border)
  %position.after = add i64 %position, %want
  br label %look
look:
  %looks = phi i64 [0, %plan], [%looks.after, %again]
  br label %each
each:
  %other = phi i64 [0, %look], [%other.after, %each]
  %lowest = phi i64 [-1, %look], [%lower, %each]
  %offset = mul i64 %other, {COUNTER_STRIDE}
  %counter.at = getelementptr i8, ptr %others, i64 %offset
  %counter = load atomic i64, ptr %counter.at acquire, align 8
  %lower = call i64 @llvm.umin.i64(i64 %lowest, i64 %counter)
  %other.after = add i64 %other, 1
  %others.left = icmp ult i64 %other.after, %count
  br i1 %others.left, label %each, label %compare
compare:
  %limit = add i64 %lower, %ahead
  %go = icmp uge i64 %limit, %position.after
  br i1 %go, label %move, label %again
again:
  call void @llvm.x86.sse2.pause()
  %looks.after = add i64 %looks, 1
  %patient = icmp ult i64 %looks.after, {_LOOKS}
  br i1 %patient, label %look, label %end
move:
  %place = urem i64 %position, %ring.bytes
  %slot = getelementptr i8, ptr %ring, i64 %place
  %here = getelementptr i8, ptr %memory, i64 %done
  %to = select i1 %is.writer, ptr %slot, ptr %here
  %from = select i1 %is.writer, ptr %here, ptr %slot
  %state.then = call i64 @sample(ptr %from, i64 %want, i64 %state)
  br i1 %is.past, label %past, label %cached
past:
  call void @copy(ptr %to, ptr %from, i64 %want)
  br label %sampled
cached:
  call void @copy_in_cache(ptr %to, ptr %from, i64 %want)
  br label %sampled
sampled:
  %state.after = call i64 @sample(ptr %from, i64 %want, i64 %state.then)
  store atomic i64 %position.after, ptr %mine release, align 8
  %done.after = add i64 %done, %want
  br label %next
end:
  store i64 %state, ptr %state.at
  ret i64 %done
}}
declare void @llvm.x86.sse2.pause()
"""


DECLARATIONS = "declare i64 @llvm.umin.i64(i64, i64)\n!0 = !{i32 1}\n"


@cache
def copy_loop() -> Callable[..., object]:
    """Copies past the cache: destination's address, source's address, bytes. Without the interpreter's lock."""
    return _compiled("copy", [copy_assembly("copy", past_cache=True)], None, [ctypes.c_void_p] * 2 + [ctypes.c_size_t])


@cache
def pass_loop() -> Callable[..., int]:
    """Moves bytes through a ring that another process moves them on from, or has moved them to.

    By position: address of this side's counter, address of the others' counters, how many those are, how far this side
    may be ahead of the lowest of them (the ring's size for the writer, 0 for a reader), address and size of the ring,
    size of a chunk (a divisor of it), address of the checksum, address and number of the bytes, whether they go into
    the ring, and whether the stores go past the cache.

    Both sides come to the same checksum if they move the same bytes between the same positions: of each chunk it reads,
    twice, the first and the last `SUMMED_END_BYTES`, and the whole of what is no longer than `SUMMED_WHOLE_BYTES`.

    Returns:
        How many bytes were moved, when all are or when the others have not gone on for about a microsecond.
    """
    copies = [copy_assembly("copy", past_cache=True), copy_assembly("copy_in_cache", past_cache=False)]
    word, address = ctypes.c_uint64, ctypes.c_void_p
    types = [address, address, word, word, address, word, word, address, address, word, word, word]
    return _compiled("pass", [*copies, _sum_assembly(), _sample_assembly(), _pass_assembly()], word, types)


def _compiled(name: str, functions: list[str], result: Any, types: list[Any]) -> Callable[..., Any]:
    import llvmlite.binding as llvm  # not above: with it loaded, vLLM alone cannot start in a forked process

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten()
    )
    module = llvm.parse_assembly("\n".join([*functions, DECLARATIONS]))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(result, *types)(engine.get_function_address(name))
    function.memory_of_the_code = engine  # type: ignore[attr-defined]
    return function
