"""Frames in memory that one writer and several readers map, handed over by counters: no system call, no message.

The memory::

    counters   of the writer: frames published, frames needed back; of each reader: frames taken, frames released
    cards      where a frame lies, how long it is, and its header
    data       the frames, each wherever there is room

The writer fills a frame, writes its card, then counts it as published. A reader that sees the count reads card and
frame, counts the frame as taken when it has read it, and as released when nothing that it still holds lies there. Room
is taken at the lowest free place.

Why plain stores suffice: a counter is an aligned 64-bit word that one process writes, by one store. On x86 (total store
order) a store is not seen before the stores that precede it in its thread, a load is not made before the loads that
precede it, and a store is not made before earlier loads. So a reader that sees a frame counted sees its bytes, and a
writer that sees it released overwrites nothing that is still to be read. Copies that bypass the cache are the
exception: `streaming` ends its own with a fence, and so does the C library. Other processors promise less:
`counters_suffice` says so.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

NUM_CARDS = 32
"""Frames that may be published and not taken."""
HEADER_BYTES = 16 << 10
"""Longest header."""
IN_FLIGHT_BYTES = 64 << 20
"""Written and not taken yet, unless it is one frame alone. Less would stay in a cache that the two cores share, but not
all cores share one: from one cache to another a line moves three times slower than by way of the memory."""

_LINE = 8  # words of a cache line: counters that different processes write lie in different ones
_PUBLISHED, _NEEDED = 0, _LINE
_CARD_WORDS = 3 + HEADER_BYTES // 8
_SPIN_SECONDS = 5e-3
_PAUSE = 1e-3

Found = TypeVar("Found")
Pause = Callable[[float], None]
"""Sleeps for at most this many seconds; raises when there is no reason to wait any longer."""
Watch = Callable[[], Pause]
"""Called when a wait begins."""


class FrameError(RuntimeError):
    """A card says what cannot be."""


def counters_suffice() -> bool:
    """Whether this processor keeps stores in order, and writes a 64-bit word at once."""
    return platform.machine() in ("x86_64", "AMD64")


def check_reader(reader: int, *, readers: int) -> None:
    """Refuses the number of a reader that is not there.

    Raises:
        FrameError: naming it.
    """
    if not 0 <= reader < readers:
        raise FrameError(f"Reader {reader} of {readers}: there is no such one.")


def control_bytes(readers: int) -> int:
    """Bytes of counters and cards; the data begin there, at a memory page."""
    return -(-8 * (_first_card(readers) + NUM_CARDS * _CARD_WORDS) // mmap.PAGESIZE) * mmap.PAGESIZE


def _first_card(readers: int) -> int:
    return 2 * _LINE * (1 + readers)


class FrameMemory:
    """The mapped memory, as counters, cards and data.

    Args:
        mapping: `control_bytes` and the data; what follows is not touched.
        readers: how many there are.
        data_bytes: how much data there is room for.
    """

    def __init__(self, mapping: mmap.mmap, *, readers: int, data_bytes: int) -> None:
        start = control_bytes(readers)
        self.readers = readers
        self.words = memoryview(mapping)[:start].cast("Q")
        self.data = torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=data_bytes)
        self.data_bytes = data_bytes
        self._texts = memoryview(mapping)[:start]

    def taken(self, reader: int) -> int:
        """The word that counts what this reader has taken."""
        return 2 * _LINE * (1 + reader)

    def released(self, reader: int) -> int:
        """The word that counts what this reader has released."""
        return self.taken(reader) + _LINE

    def card(self, number: int) -> tuple[int, memoryview]:
        """The first word of a frame's card, and its header's bytes."""
        word = _first_card(self.readers) + number % NUM_CARDS * _CARD_WORDS
        return word, self._texts[8 * (word + 3) : 8 * (word + _CARD_WORDS)]


class FrameWriter:
    """The writer's half.

    Args:
        memory: all counters at zero.
        in_flight_bytes: see `IN_FLIGHT_BYTES`.
    """

    def __init__(self, memory: FrameMemory, *, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self._memory = memory
        self._in_flight_bytes = in_flight_bytes
        self._published = 0
        self._places: deque[tuple[int, int]] = deque()  # first and last byte + 1, of frames that are not released
        self._open = 0
        self._reserved: int | None = None  # where the rest of the tensor goes whose first frame was given room

    def counts(self) -> list[tuple[int, int]]:
        """Frames taken and released, of each reader."""
        words, memory = self._memory.words, self._memory
        return [(words[memory.taken(one)], words[memory.released(one)]) for one in range(memory.readers)]

    def late(self) -> list[int]:
        """The readers that have frames left to take; if there are none, those that have frames left to release."""
        counts = self.counts()
        behind = [reader for reader, (taken, _) in enumerate(counts) if taken < self._published]
        return behind or [reader for reader, (_, released) in enumerate(counts) if released < self._published]

    def room(self, num_bytes: int, *, following: int = 0) -> Tensor | None:
        """Memory for the next frame, ``uint8 [num_bytes]``; None while readers have to go on first.

        Args:
            num_bytes: how much at most.
            following: bytes of the frames after this one that go on where it ends, if all of them take no more than
                half of the memory.
        """
        words, counts = self._memory.words, self.counts()
        released = min(released for _, released in counts)
        while len(self._places) > self._published - released:
            self._places.popleft()
        on_their_way = self._published - min(taken for taken, _ in counts)
        if on_their_way:
            waiting = sum(end - start for start, end in list(self._places)[-on_their_way:])
            if waiting + num_bytes > self._in_flight_bytes or on_their_way == NUM_CARDS:
                return None
        whole = num_bytes + following
        together = 2 * whole <= self._memory.data_bytes
        place = self._reserved if self._reserved is not None else self._lowest_gap(whole if together else num_bytes)
        # Readers copy what they hold back if it is in the way. Not after this tensor has begun, whose frames they keep.
        words[_NEEDED] = self._published if place is None else 0
        if place is None:
            return None
        self._open = place
        self._reserved = place + num_bytes if following and together else None
        return self._memory.data[place : place + num_bytes]

    def _lowest_gap(self, num_bytes: int) -> int | None:
        place = 0
        for start, end in sorted(self._places):
            if place + num_bytes <= start:
                break
            place = end
        return place if place + num_bytes <= self._memory.data_bytes else None

    def publish(self, num_bytes: int, header: bytes) -> None:
        """Hands the frame over that lies in the memory which `room` gave last.

        Args:
            num_bytes: how much of it.
            header: at most `HEADER_BYTES` bytes.
        """
        words, (word, text) = self._memory.words, self._memory.card(self._published)
        text[: len(header)] = header
        words[word], words[word + 1], words[word + 2] = self._open, num_bytes, len(header)
        self._places.append((self._open, self._open + -(-num_bytes // 64) * 64))
        self._published += 1
        words[_PUBLISHED] = self._published


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What was published.

    Attributes:
        content: ``uint8 [n]``, in the shared memory.
        header: that came with it.
    """

    content: Tensor
    header: bytes


class FrameReader:
    """One reader's half.

    Args:
        memory: mapped before the first frame is published.
        reader: its number.
    """

    def __init__(self, memory: FrameMemory, *, reader: int) -> None:
        check_reader(reader, readers=memory.readers)
        self._memory = memory
        self._taken_word, self._released_word = memory.taken(reader), memory.released(reader)
        self._taken = self._released = 0

    def next(self) -> Frame | None:
        """The next frame, if there is one: the first that is not taken."""
        words = self._memory.words
        if words[_PUBLISHED] <= self._taken:
            return None
        word, text = self._memory.card(self._taken)
        place, num_bytes, header_bytes = words[word], words[word + 1], words[word + 2]
        if place + num_bytes > self._memory.data_bytes or header_bytes > HEADER_BYTES:
            raise FrameError(f"Frame {self._taken}: {num_bytes} bytes at {place} lie outside the memory.")
        return Frame(content=self._memory.data[place : place + num_bytes], header=bytes(text[:header_bytes]))

    def take(self) -> None:
        """Counts the frame as read; its memory stays as it is."""
        self._taken += 1
        self._memory.words[self._taken_word] = self._taken

    def release(self) -> None:
        """Gives the memory of all frames back that were taken."""
        self._released = self._taken
        self._memory.words[self._released_word] = self._released

    def is_needed(self) -> bool:
        """Whether the writer has no room until frames are released that were taken."""
        return min(self._memory.words[_NEEDED], self._taken) > self._released


def wait_for(attempt: Callable[[], Found | None], *, watch: Watch) -> Found:
    """Tries until there is a result: for five milliseconds, letting others run in between, then with pauses.

    A frame takes less than a millisecond, and to wake up from a pause may take as long.

    Args:
        attempt: gives the result, or None.
        watch: what to do while there is none.
    """
    found = attempt()
    if found is not None:
        return found
    pause, end = watch(), time.perf_counter() + _SPIN_SECONDS
    while (found := attempt()) is None:
        if time.perf_counter() < end:
            os.sched_yield()
        else:
            pause(_PAUSE)
    return found
