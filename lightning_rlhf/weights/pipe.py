"""A pipe in shared memory: a ring of bytes that one writer fills while its readers, close behind, empty it.

For readers that copy what arrives into memory of their own. Where frames (`frames`) pass whole tensors, to be read in
place, the ring is so small that it can stay in a cache: bytes then cross the memory bus twice, as in a plain copy, not
four times. The memory::

    counters   position of the writer in the stream, and of each reader; each in lines of its own
    ring       the byte at position p lies at p modulo the ring's size

Positions only grow, from sync to sync as well. Each side moves bytes in chunks, by a compiled loop that watches the
other's counter, and comes back to the interpreter when the other has stopped for a while. Why plain stores of counters
suffice: see `frames`.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import Any

from torch import Tensor

from lightning_rlhf.weights.copy_loops import COUNTER_STRIDE, LINE_BYTES, pass_loop
from lightning_rlhf.weights.frames import FrameError, Watch, check_reader, wait_for
from lightning_rlhf.weights.streaming import STREAM_BYTES

RING_BYTES = 2 << 20
"""With half of it two cores wait for each other; four times as much leaves a cache that others use as well."""
_CHUNKS = 8
_WORD = 8
_BLOCK_BYTES = 256
"""Of a header and its length, which are read at once; a longer one in two steps."""
LONGEST_HEADER = 1 << 20


def ring_bytes(bucket_bytes: int) -> int:
    """Size of the ring beside buckets of this size: whole memory pages."""
    return max(mmap.PAGESIZE, min(RING_BYTES, bucket_bytes // 32 // mmap.PAGESIZE * mmap.PAGESIZE))


def pipe_bytes(ring: int, *, readers: int) -> int:
    """Bytes of counters and ring."""
    return -(-COUNTER_STRIDE * (1 + readers) // mmap.PAGESIZE) * mmap.PAGESIZE + ring


class PipeMemory:
    """The mapped memory.

    Args:
        memory: ``uint8 [pipe_bytes]``, zeros at first, its start at a memory page.
        ring: size of the ring.
        readers: how many there are.
    """

    def __init__(self, memory: Tensor, *, ring: int, readers: int) -> None:
        if memory.numel() != pipe_bytes(ring, readers=readers) or ring % (_CHUNKS * LINE_BYTES):
            raise FrameError(f"{memory.numel()} bytes are no pipe of {ring} for {readers} readers.")
        self.readers = readers
        self.ring = ring
        self.chunk = ring // _CHUNKS
        self.address = memory.data_ptr()
        self.ring_address = self.address + memory.numel() - ring
        counters: Any = memory[: memory.numel() - ring].numpy()
        self.positions = memoryview(counters).cast("Q")[:: COUNTER_STRIDE // 8]  # keeps the memory alive
        """Of the writer, then of each reader."""


class _CacheChoice:
    """Whether the writer's stores stay in the cache or go past it: in it, unless that has just been seen to be slower.

    Two cores that share a cache pass bytes through it at the speed of a plain copy, while past it they share a way to
    the memory. Cores that share none pass a line of the cache on seven times slower than by way of the memory. Which of
    it is the case nobody says, and on a virtual machine it changes. So each sync tries both, past the cache first, and
    compares the fastest stretches: a slow one may be a process that was not running.

    Args:
        ring: size of the ring. The first ring of a trial does not count: it takes what the other way has left.
    """

    AGAIN_BYTES = 1 << 30
    SLOW = 0.5
    """Of the speed past the cache."""
    ENOUGH = 0.8
    """Of the speed past the cache: in short trials the interpreter takes a part, more of it from the faster way."""

    def __init__(self, ring: int) -> None:
        self._ring = ring
        self.restart()

    def restart(self) -> None:
        """Begins with the trials."""
        self._fastest_past = 0.0
        self._begin(in_cache=False, is_trial=True)

    def _begin(self, *, in_cache: bool, is_trial: bool) -> None:
        self.in_cache, self._is_trial = in_cache, is_trial
        self._bytes, self._fastest, self._slow_ones = 0, 0.0, 0

    @property
    def stretch(self) -> int:
        """How many bytes to move before `moved` is told."""
        if self._is_trial:
            return self._ring // 4
        return 2 * self._ring if self.in_cache else 32 * self._ring

    def moved(self, num_bytes: int, seconds: float) -> None:
        """Takes the speed of a stretch into account; that of a short one says nothing."""
        if num_bytes < self._ring // _CHUNKS:
            return
        speed = num_bytes / seconds
        self._bytes += num_bytes
        self._slow_ones += self.in_cache and speed < self.SLOW * self._fastest_past
        if not self._is_trial:
            if self._slow_ones or self._bytes > self.AGAIN_BYTES:
                self.restart()
            return
        if self._bytes > self._ring:
            self._fastest = max(self._fastest, speed)
        is_over = self._bytes >= 2 * self._ring
        if not self.in_cache and is_over:
            self._fastest_past = self._fastest
            self._begin(in_cache=True, is_trial=True)
        elif self.in_cache and (is_over or self._slow_ones > 1):
            self._begin(in_cache=self._fastest > self.ENOUGH * self._fastest_past, is_trial=False)


class _Side:
    """What both halves do.

    Args:
        memory: the pipe.
        side: 0 for the writer, 1 for the first reader.
    """

    def __init__(self, memory: PipeMemory, side: int) -> None:
        self._memory = memory
        self._side = side
        self._writes = side == 0
        self._checksum = ctypes.c_uint64()
        self._block = bytearray(_BLOCK_BYTES)
        self._block_at = ctypes.addressof(ctypes.c_char.from_buffer(self._block))
        mine, first_reader = memory.address + side * COUNTER_STRIDE, memory.address + COUNTER_STRIDE
        # the others' counters, how many, and how far this side may be ahead of them
        others = (first_reader, memory.readers, memory.ring) if self._writes else (memory.address, 1, 0)
        ring = (memory.ring_address, memory.ring, memory.chunk)
        self._arguments = (mine, *others, *ring, ctypes.addressof(self._checksum))

    def _pass(self, address: int, size: int, *, past_cache: bool, watch: Watch) -> None:
        loop, done = pass_loop(), 0

        def attempt() -> int | None:
            return loop(*self._arguments, address + done, size - done, self._writes, past_cache) or None

        while done < size:
            done += wait_for(attempt, watch=watch)

    def _move_to_line(self) -> None:
        """Skips the rest of the line: what comes next begins at one."""
        positions = self._memory.positions
        positions[self._side] = -(-positions[self._side] // LINE_BYTES) * LINE_BYTES


class PipeWriter(_Side):
    """The writer's half."""

    def __init__(self, memory: PipeMemory) -> None:
        super().__init__(memory, 0)
        self._choice = _CacheChoice(memory.ring)

    def restart(self) -> None:
        """A sync begins."""
        self._choice.restart()

    def read_positions(self) -> list[int]:
        """Of the readers."""
        return self._memory.positions.tolist()[1 : 1 + self._memory.readers]

    def late(self) -> list[int]:
        """The readers that have not read all."""
        written = self._memory.positions[0]
        return [reader for reader, position in enumerate(self.read_positions()) if position < written]

    def write(self, header: bytes, content: Tensor, *, watch: Watch) -> None:
        """Puts a header, bytes and their checksum into the pipe.

        Args:
            header: of 1 to `LONGEST_HEADER` bytes.
            content: dense ``uint8 [n]`` in host memory.
            watch: see `Watch`.

        Raises:
            FrameError: if the header is longer.
        """
        if len(header) > LONGEST_HEADER:
            raise FrameError(f"A header of {len(header)} bytes: at most {LONGEST_HEADER} are read.")
        self._write_header(header, watch=watch)
        self._checksum.value = 0
        address, size, done = content.data_ptr(), content.numel(), 0
        is_large = size >= STREAM_BYTES
        while done < size:
            # up to a chunk's border: both sides take checksums of the same parts
            position, start = self._memory.positions[0], time.perf_counter()
            stretch = min(size - done, self._choice.stretch - position % self._memory.chunk)
            past_cache = is_large and not self._choice.in_cache
            self._pass(address + done, stretch, past_cache=past_cache, watch=watch)
            if is_large:
                self._choice.moved(stretch, time.perf_counter() - start)
            done += stretch
        self._move_to_line()
        self._block[:_WORD] = self._checksum.value.to_bytes(_WORD, "little")
        self._pass(self._block_at, _WORD, past_cache=False, watch=watch)
        self._move_to_line()

    def _write_header(self, header: bytes, *, watch: Watch) -> None:
        whole = len(header).to_bytes(_WORD, "little") + header
        self._block[:] = whole[:_BLOCK_BYTES].ljust(_BLOCK_BYTES)
        self._pass(self._block_at, _BLOCK_BYTES, past_cache=False, watch=watch)
        if rest := whole[_BLOCK_BYTES:]:
            memory = ctypes.create_string_buffer(rest)
            self._pass(ctypes.addressof(memory), len(rest), past_cache=False, watch=watch)
            self._move_to_line()

    def end(self, *, watch: Watch) -> None:
        """Says that nothing follows."""
        self._write_header(b"", watch=watch)


class PipeReader(_Side):
    """One reader's half.

    Args:
        memory: attached before the first byte is written.
        reader: its number.
    """

    def __init__(self, memory: PipeMemory, *, reader: int) -> None:
        check_reader(reader, readers=memory.readers)
        super().__init__(memory, 1 + reader)

    def header(self, *, watch: Watch) -> bytes | None:
        """The next header; None at the end.

        Raises:
            FrameError: if it is longer than any header is.
        """
        self._pass(self._block_at, _BLOCK_BYTES, past_cache=False, watch=watch)
        block = bytes(self._block)
        size = int.from_bytes(block[:_WORD], "little")
        if size > LONGEST_HEADER:
            raise FrameError(f"A header of {size} bytes was announced.")
        left = _WORD + size - _BLOCK_BYTES
        if left <= 0:
            return block[_WORD : _WORD + size] or None
        rest = ctypes.create_string_buffer(left)
        self._pass(ctypes.addressof(rest), left, past_cache=False, watch=watch)
        self._move_to_line()
        return block[_WORD:] + rest.raw

    def read(self, content: Tensor, *, watch: Watch) -> None:
        """Fills ``content``, dense ``uint8 [n]`` in host memory, with the bytes that the header was about.

        Raises:
            FrameError: if they are not those that were written.
        """
        self._checksum.value = 0
        size = content.numel()
        self._pass(content.data_ptr(), size, past_cache=size >= STREAM_BYTES, watch=watch)
        self._move_to_line()
        found = self._checksum.value
        self._pass(self._block_at, _WORD, past_cache=False, watch=watch)
        self._move_to_line()
        sent = int.from_bytes(self._block[:_WORD], "little")
        if found != sent:
            raise FrameError(f"corrupted: checksum {found:016x}, but {sent:016x} was sent ({size} bytes)")
