"""Frames handed over by counters, both halves in one process."""

from __future__ import annotations

import mmap

import pytest
import torch

from lightning_rlhf.weights.frames import (
    NUM_CARDS,
    FrameError,
    FrameMemory,
    FrameReader,
    FrameWriter,
    control_bytes,
    wait_for,
)


def halves(
    num_bytes: int, *, readers: int = 1, in_flight_bytes: int = 1 << 20
) -> tuple[FrameWriter, list[FrameReader]]:
    memory = FrameMemory(mmap.mmap(-1, control_bytes(readers) + num_bytes), readers=readers, data_bytes=num_bytes)
    writer = FrameWriter(memory, in_flight_bytes=in_flight_bytes)
    return writer, [FrameReader(memory, reader=reader) for reader in range(readers)]


def write(writer: FrameWriter, num_bytes: int, *, value: int, following: int = 0) -> int:
    """Where it lies."""
    room = writer.room(num_bytes, following=following)
    assert room is not None
    room.fill_(value)
    writer.publish(num_bytes, b"header %d" % value)
    return room.storage_offset()


def test_a_frame_arrives_with_its_header_and_its_room_comes_back_when_it_is_released() -> None:
    writer, (reader,) = halves(256)
    assert reader.next() is None
    for value in range(100):  # many times around cards and memory
        write(writer, 192, value=value)
        assert writer.room(128) is None
        frame = reader.next()
        assert frame is not None
        assert (frame.content.tolist(), frame.header) == ([value] * 192, b"header %d" % value)
        assert not reader.is_needed()  # not taken yet
        reader.take()
        assert reader.next() is None
        assert writer.room(128) is None
        assert reader.is_needed()
        reader.release()
        assert not reader.is_needed()
        assert writer.room(128) is not None


def test_the_slowest_reader_counts_and_is_named() -> None:
    writer, (quick, slow) = halves(128, readers=2)
    write(writer, 128, value=1)
    assert writer.late() == [0, 1]
    quick.next()
    quick.take()
    quick.release()
    assert writer.late() == [1]
    assert writer.room(64) is None
    slow.take()
    assert writer.late() == [1]
    slow.release()
    assert writer.late() == []
    assert writer.room(64) is not None


def test_little_is_on_its_way_but_one_frame_always_goes() -> None:
    writer, (reader,) = halves(1024, in_flight_bytes=128)
    write(writer, 64, value=1)
    write(writer, 64, value=2)
    assert writer.room(64) is None
    reader.take()
    assert not reader.is_needed()  # there is room enough: what is held back need not be copied
    assert writer.room(64) is not None
    reader.take()
    write(writer, 512, value=3)


def test_what_belongs_together_lies_together() -> None:
    writer, (reader,) = halves(1024)
    start = write(writer, 128, value=1)
    write(writer, 64, value=2)
    reader.take()
    reader.release()
    first = write(writer, 64, value=3, following=128)  # the gap at the start has 128 bytes
    assert first == start + 192
    assert write(writer, 64, value=4, following=64) == first + 64
    assert write(writer, 64, value=5) == first + 128
    assert write(writer, 128, value=6) == start


def test_cards_are_not_used_again_before_they_are_read() -> None:
    writer, (reader,) = halves(64 * (NUM_CARDS + 1))
    for value in range(NUM_CARDS):
        write(writer, 64, value=value)
    assert writer.room(64) is None
    frame = reader.next()
    assert frame is not None
    assert int(frame.content[0]) == 0
    reader.take()
    assert writer.room(64) is not None


def test_a_card_is_not_believed() -> None:
    memory = FrameMemory(mmap.mmap(-1, control_bytes(1) + 64), readers=1, data_bytes=64)
    writer, reader = FrameWriter(memory), FrameReader(memory, reader=0)
    assert writer.room(64) is not None
    writer.publish(65, b"")
    with pytest.raises(FrameError, match="65 bytes at 0 lie outside"):
        reader.next()
    with pytest.raises(FrameError, match="Reader 1 of 1"):
        FrameReader(memory, reader=1)


def test_waiting_ends_with_a_result_or_an_error() -> None:
    tries = iter([None] * 50 + [torch.ones(1)])
    assert wait_for(lambda: next(tries), watch=lambda: lambda _: None).tolist() == [1.0]

    def gone(_: float) -> None:
        raise TimeoutError("nobody there")

    with pytest.raises(TimeoutError, match="nobody there"):
        wait_for(lambda: None, watch=lambda: gone)
