"""The pipe in memory, both halves in one process."""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_rlhf.weights.copy_loops import SUMMED_END_BYTES, SUMMED_WHOLE_BYTES
from lightning_rlhf.weights.frames import FrameError
from lightning_rlhf.weights.pipe import (
    LONGEST_HEADER,
    RING_BYTES,
    PipeMemory,
    PipeReader,
    PipeWriter,
    _CacheChoice,
    pipe_bytes,
    ring_bytes,
)

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere counters do not suffice")
SMALL = 4096


def halves(ring: int = SMALL, *, readers: int = 1) -> tuple[PipeWriter, list[PipeReader]]:
    pages = torch.zeros(pipe_bytes(ring, readers=readers) + 4096, dtype=torch.uint8)
    first = -pages.data_ptr() % 4096
    memory = PipeMemory(pages[first : first + pipe_bytes(ring, readers=readers)], ring=ring, readers=readers)
    return PipeWriter(memory), [PipeReader(memory, reader=reader) for reader in range(readers)]


def patient(seconds: float = 10.0) -> Callable[[float], None]:
    end = time.monotonic() + seconds

    def pause(longest: float) -> None:
        assert time.monotonic() < end, "the other side stands still"
        time.sleep(longest)

    return pause


def draw(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def received(reader: PipeReader, sizes: list[int]) -> list[tuple[bytes, Tensor]]:
    got = []
    while (header := reader.header(watch=patient)) is not None:
        size = sizes[len(got)]
        memory = torch.full((size + 128,), 7, dtype=torch.uint8)
        reader.read(memory[61 : 61 + size], watch=patient)
        assert bool((memory[:61] == 7).all() and (memory[61 + size :] == 7).all()), "wrote beside the content"
        got.append((header, memory[61 : 61 + size]))
    return got


@pytest.mark.parametrize(("ring", "readers"), [(SMALL, 1), (SMALL, 3), (RING_BYTES, 1), (RING_BYTES, 2)])
def test_headers_and_bytes_arrive_many_times_around_the_ring(ring: int, readers: int) -> None:
    sizes = [0, 1, 63, 64, 65, 511, 512, 513, SMALL, SMALL + 1, 3 * SMALL + 5, 65535, 65536, 70001, 0, 900_001]
    sizes += [] if ring == SMALL else [ring, 9 * ring + 12345]  # trials of both ways
    contents = [draw(size) for size in sizes]
    headers = [bytes([65 + index]) * length for index, length in enumerate([1, 247, 248, 249, 5000, *[40] * 50])]
    writer, every = halves(ring, readers=readers)
    got: dict[int, list[tuple[bytes, Tensor]]] = {}
    for _ in range(3):  # positions go on, and are no multiples of anything
        writer.restart()
        threads = [
            threading.Thread(target=lambda one, reader: got.update({one: received(reader, sizes)}), args=pair)
            for pair in enumerate(every)
        ]
        for thread in threads:
            thread.start()
        for header, content in zip(headers, contents, strict=False):
            writer.write(header, content, watch=patient)
        writer.end(watch=patient)
        for thread in threads:
            thread.join(20)
        assert sorted(got) == list(range(readers))
        for arrived in got.values():
            assert [header for header, _ in arrived] == headers[: len(contents)]
            assert all(torch.equal(one, sent) for (_, one), sent in zip(arrived, contents, strict=True))
        assert writer.late() == []
        got.clear()


def checksum_by_hand(content: bytes, *, position: int, chunk: int) -> int:
    state = 0
    while content:
        part, content = content[: chunk - position % chunk], content[chunk - position % chunk :]
        position += len(part)
        first = part if len(part) <= SUMMED_WHOLE_BYTES else part[:SUMMED_END_BYTES]
        last = b"" if len(part) <= SUMMED_WHOLE_BYTES else part[-SUMMED_END_BYTES:]
        for end in (first, last) * 2:  # before and after it is copied
            whole = len(end) // 8 * 8
            words = [int.from_bytes(end[at : at + 8], "little") for at in range(0, whole, 8)]
            state = (state + sum(words) + sum(end[whole:])) * 0x9E3779B97F4A7C15 % 2**64
    return state


@pytest.mark.parametrize("size", [1, 8, 1023, 70_000, 300_001, 1_100_000])
def test_the_checksum_against_a_loop(size: int) -> None:
    writer, (reader,) = halves(RING_BYTES)
    content, memory = draw(size), torch.empty(size, dtype=torch.uint8)
    for _ in range(2):
        writer.write(b"x", content, watch=patient)
        start = (
            reader._memory.positions[0] - 64 - (size + 63) // 64 * 64
        )  # the line of the checksum, and whole ones before
        assert reader.header(watch=patient) == b"x"
        reader.read(memory, watch=patient)
        expected = checksum_by_hand(content.numpy().tobytes(), position=start, chunk=RING_BYTES // 8)
        assert int.from_bytes(reader._block[:8], "little") == expected


@pytest.mark.parametrize(("size", "at"), [(100, 99), (5000, 1234), (900_000, 0), (900_000, 511)])
def test_a_changed_byte_is_found(size: int, at: int) -> None:
    writer, (reader,) = halves(RING_BYTES)
    writer.write(b"x", draw(size), watch=patient)
    reader.header(watch=patient)
    place = reader._memory.ring_address + 256 + at
    ctypes.memset(place, ctypes.string_at(place, 1)[0] ^ 8, 1)
    with pytest.raises(FrameError, match=f"corrupted: checksum [0-9a-f]{{16}}, but .* was sent \\({size} bytes"):
        reader.read(torch.empty(size, dtype=torch.uint8), watch=patient)


def test_a_chunk_that_is_read_too_early_is_found() -> None:
    """Its counter was seen before its bytes: it holds what went through the ring before, in whole or at its end."""
    for stale in (slice(0, RING_BYTES // 8), slice(RING_BYTES // 8 - 4096, RING_BYTES // 8)):
        writer, (reader,) = halves(RING_BYTES)
        size = 3 * RING_BYTES // 8
        writer.write(b"x", draw(size), watch=patient)
        reader.header(watch=patient)
        place = reader._memory.ring_address + RING_BYTES // 8 + stale.start
        ctypes.memset(place, 0, stale.stop - stale.start)
        with pytest.raises(FrameError, match="corrupted"):
            reader.read(torch.empty(size, dtype=torch.uint8), watch=patient)


def test_whoever_waits_asks_whether_to_go_on_and_the_late_are_named() -> None:
    class GaveUpError(Exception):
        pass

    def give_up(seconds: float) -> None:
        raise GaveUpError

    writer, (quick, slow) = halves(readers=2)
    with pytest.raises(GaveUpError):
        quick.header(watch=lambda: give_up)
    assert writer.late() == []
    with pytest.raises(GaveUpError):  # the ring is full
        writer.write(b"x", draw(2 * SMALL), watch=lambda: give_up)
    assert writer.late() == [0, 1]
    assert quick.header(watch=lambda: give_up) == b"x"
    with pytest.raises(GaveUpError):  # the rest never comes
        quick.read(torch.empty(2 * SMALL, dtype=torch.uint8), watch=lambda: give_up)
    assert writer.late() == [1]
    assert slow.header(watch=lambda: give_up) == b"x"


def test_what_cannot_be_is_refused() -> None:
    writer, (reader,) = halves()
    with pytest.raises(FrameError, match="Reader 1 of 1"):
        PipeReader(reader._memory, reader=1)
    with pytest.raises(FrameError, match="no pipe of 4096 for 2 readers"):
        PipeMemory(torch.zeros(pipe_bytes(8192, readers=2), dtype=torch.uint8), ring=4096, readers=2)
    with pytest.raises(FrameError, match=f"A header of {LONGEST_HEADER + 1} bytes"):
        writer.write(bytes(LONGEST_HEADER + 1), draw(1), watch=patient)
    writer._block[:8] = (LONGEST_HEADER + 1).to_bytes(8, "little")
    writer._pass(writer._block_at, 256, past_cache=False, watch=patient)
    with pytest.raises(FrameError, match=f"A header of {LONGEST_HEADER + 1} bytes"):
        reader.header(watch=patient)


@pytest.mark.parametrize(("bucket", "ring"), [(64, 4096), (8192, 4096), (1 << 20, 32768), (1 << 26, 1 << 21)])
def test_the_ring_is_a_small_part_of_the_memory(bucket: int, ring: int) -> None:
    assert ring_bytes(bucket) == ring


class TestCacheChoice:
    """GB/s past the cache and in it, 13 and 17 where cores share one, else 18 and 2.4."""

    @staticmethod
    def move(choice: _CacheChoice, num_bytes: int, *, past: float, cached: float) -> float:
        """Seconds."""
        total = 0.0
        while num_bytes > 0:
            stretch = min(choice.stretch, num_bytes)
            seconds = stretch / (cached if choice.in_cache else past) / 1e9
            total += seconds
            num_bytes -= stretch
            choice.moved(stretch, seconds)
        return total

    def test_it_takes_what_is_faster(self) -> None:
        near, far = _CacheChoice(RING_BYTES), _CacheChoice(RING_BYTES)
        seconds = self.move(near, 10**9, past=13, cached=17)
        assert near.in_cache
        assert seconds < 1.02 / 17
        seconds = self.move(far, 10**9, past=18, cached=2.4)
        assert not far.in_cache
        assert seconds < 1.03 / 18

    @pytest.mark.parametrize(("cached", "is_taken"), [(12.0, True), (10.5, True), (10.3, False), (6.0, False)])
    def test_it_takes_the_cache_if_that_is_about_as_fast(self, cached: float, is_taken: bool) -> None:
        choice = _CacheChoice(RING_BYTES)
        self.move(choice, 8 * RING_BYTES, past=13, cached=cached)
        assert choice.in_cache == is_taken

    def test_it_notices_when_the_cores_move_apart_and_when_they_come_together(self) -> None:
        choice = _CacheChoice(RING_BYTES)
        self.move(choice, 200 << 20, past=13, cached=17)
        assert choice.in_cache
        seconds = self.move(choice, 200 << 20, past=18, cached=2.4)
        assert not choice.in_cache
        assert seconds < 1.4 * (200 << 20) / 18e9
        self.move(choice, _CacheChoice.AGAIN_BYTES + (64 << 20), past=13, cached=17)
        assert choice.in_cache

    def test_one_slow_stretch_decides_nothing(self) -> None:
        choice = _CacheChoice(RING_BYTES)
        for in_trial in range(0, 8 * RING_BYTES, RING_BYTES // 4):
            choice.restart()
            self.move(choice, in_trial, past=13, cached=17)
            choice.moved(RING_BYTES // 4, 1e-3)  # the process was not running
            self.move(choice, 24 * RING_BYTES, past=13, cached=17)
            assert choice.in_cache, in_trial

    def test_the_end_of_a_tensor_is_too_short_to_say_anything(self) -> None:
        choice = _CacheChoice(RING_BYTES)
        self.move(choice, 24 * RING_BYTES, past=13, cached=17)
        choice.moved(100, 1e-6)  # 0.1 GB/s
        assert choice.in_cache
