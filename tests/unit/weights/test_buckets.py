"""The bucket codec by itself: sizes by hand, refusals, and one flipped bit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_rlhf.weights.bucket_header import DTYPES, BucketError, BucketHeader
from lightning_rlhf.weights.buckets import BucketPacker, BucketReader
from lightning_rlhf.weights.checksum import (
    BLOCK_BYTES,
    ROW_BYTES,
    SAMPLED_EVERY,
    SAMPLED_WORDS,
    RunningChecksum,
    checksum_of,
)
from lightning_rlhf.weights.groups import FusedGroups, with_tied, without_tied
from lightning_rlhf.weights.topology import build_topology


def packed(tensors: dict[str, Tensor], bucket_bytes: int, **kwargs: bool) -> list[tuple[BucketHeader, Tensor]]:
    buffers: list[Tensor] = []

    def buffer(_: int, __: int) -> Tensor:
        buffers.append(torch.full((bucket_bytes,), 255, dtype=torch.uint8))
        return buffers[-1]

    headers = list(BucketPacker(bucket_bytes=bucket_bytes, buffer=buffer, **kwargs).pack(tensors.items()))
    return list(zip(headers, buffers, strict=True))


def unpacked(buckets: list[tuple[BucketHeader, Tensor]], **kwargs: bool) -> dict[str, Tensor]:
    reader = BucketReader(**kwargs)
    got = {}
    for header, buffer in buckets:
        over_the_wire = BucketHeader.from_json(json.loads(json.dumps(header.to_json())))
        got |= {name: tensor.clone() for name, tensor in reader.read(over_the_wire, buffer)}
    reader.finish(len(buckets))
    return got


def test_places_by_hand() -> None:
    """256-byte buckets; pieces begin at multiples of 64; the first three are closed at 32, 64 and 128 bytes."""
    tensors = {
        "a": torch.ones(3),  # 12 bytes; the next piece would begin at 64, beyond 32: closed
        "b": torch.ones(7, dtype=torch.bfloat16),  # 14 bytes; the next at 64: closed
        "c": torch.ones(100),  # 400 bytes are more than a bucket: 256, closed, and 144
        "d": torch.ones(30),  # 120 bytes do not fit behind 144 (the next piece at 192): a bucket of its own
        "e": torch.zeros(0, 3),
    }
    buckets = packed(tensors, 256)
    assert [[(p.name, p.start, p.place, p.num_bytes) for p in header.pieces] for header, _ in buckets] == [
        [("a", 0, 0, 12)],
        [("b", 0, 0, 14)],
        [("c", 0, 0, 256)],
        [("c", 256, 0, 144)],
        [("d", 0, 0, 120), ("e", 0, 128, 0)],
    ]
    got = unpacked(buckets)
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    assert got["e"].shape == (0, 3)


def test_a_sampled_checksum_against_a_loop_in_memory_that_begins_elsewhere() -> None:
    rows, turn = 100, 19
    content = torch.randint(0, 255, (800 + rows * ROW_BYTES + 5 * 8 + 3,), dtype=torch.uint8)[800:]
    data = content.numpy().tobytes()

    def words(start: int, count: int) -> bytes:
        total = sum(int.from_bytes(data[start + 8 * k : start + 8 * k + 8], "little") for k in range(count))
        return (total % 2**64).to_bytes(8, "little")

    sampled = [words(row * ROW_BYTES, SAMPLED_WORDS) for row in range(turn % SAMPLED_EVERY, rows, SAMPLED_EVERY)]
    text = b"".join([*sampled, words(rows * ROW_BYTES, 5), data[-3:], len(data).to_bytes(8, "little")])
    found = RunningChecksum(content, sampled=True, turn=turn).finish(len(data))
    assert found == hashlib.blake2b(text, digest_size=8).hexdigest()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 13), (130, 5)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    size = DTYPES[dtype].itemsize * torch.Size(shape).numel()
    bits = torch.arange(size, dtype=torch.int64).remainder(2 if dtype == "bool" else 251).to(torch.uint8)
    tensor = bits.view(DTYPES[dtype]).view(shape)
    (got,) = unpacked(packed({"x": tensor}, 512)).values()
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(got.reshape(-1).view(torch.uint8), bits)


def test_d06_a_float32_bias_among_bf16_stays_float32_bit_for_bit() -> None:
    bias = torch.tensor([1.0010, 1.0020])
    got = unpacked(packed({"w": torch.ones(2, 2).bfloat16(), "router.bias": bias}, 256))
    assert got["router.bias"].dtype is torch.float32
    assert torch.equal(got["router.bias"], bias)
    assert int(got["router.bias"].argmax()) == 1  # in bf16 both would be 1.0, a tie


def test_a_flipped_bit_anywhere_is_found() -> None:
    tensors = {"x": torch.randn(40, 30), "y": torch.arange(5, dtype=torch.int8)}
    header, buffer = packed(tensors, 8192)[0]
    for place in (0, 1, 2399, 4799, header.num_bytes - 1):
        damaged = buffer.clone()
        damaged[place] ^= 1
        with pytest.raises(BucketError, match="Bucket 0 is corrupted"):
            list(BucketReader().read(header, damaged))


def test_the_checksum_is_the_same_in_steps_and_at_once_and_sees_exchanged_pages() -> None:
    content = torch.randint(0, 255, (3 * BLOCK_BYTES + 4567,), dtype=torch.uint8)
    stepwise = RunningChecksum(content)
    for filled in (100, BLOCK_BYTES + 5, 2 * BLOCK_BYTES, len(content)):
        stepwise.advance(filled)
    assert stepwise.finish(len(content)) == checksum_of(content)
    exchanged = content.clone()
    exchanged[:4096], exchanged[4096:8192] = content[4096:8192], content[:4096]
    assert checksum_of(exchanged) != checksum_of(content)
    assert checksum_of(content[:-1]) != checksum_of(content)


def test_a_sampled_checksum_finds_a_stale_stretch_and_is_whole_for_small_buckets() -> None:
    content = torch.randint(0, 255, (4 * BLOCK_BYTES,), dtype=torch.uint8)
    stale = content.clone()
    stale[BLOCK_BYTES : BLOCK_BYTES + 16 * ROW_BYTES] = 0
    for turn in range(16):
        sums = [RunningChecksum(one, sampled=True, turn=turn).finish(len(one)) for one in (content, stale)]
        assert sums[0] != sums[1]
    small = content[:9000].clone()
    assert RunningChecksum(small, sampled=True).finish(9000) == RunningChecksum(small).finish(9000)
    got = unpacked(packed({"x": content, "y": content[:77]}, 1 << 20, sampled=True), sampled=True)
    assert torch.equal(got["x"], content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bytes": 10}, "lies outside"),
        ({"index": 3}, "bucket 0 comes next"),
        ({"pieces": None}, "cannot be read"),
        ({"pieces": [["x", "object", [1], 0, 0, 1]]}, "dtype 'object' is unknown"),
        ({"pieces": [["x", "int8", [4], 2, 0, 3]]}, "lies outside"),
        ({"pieces": [["x", "int8", [8], 4, 0, 4]]}, "bytes from 4 on arrived, but 0 come next"),
    ],
)
def test_a_header_is_not_believed(change: dict[str, object], message: str) -> None:
    header, buffer = packed({"x": torch.ones(16)}, 256)[0]
    with pytest.raises(BucketError, match=message):
        list(BucketReader().read(BucketHeader.from_json(header.to_json() | change), buffer))


def test_what_is_missing_at_the_end_is_an_error() -> None:
    buckets = packed({"x": torch.ones(200)}, 256)
    reader = BucketReader()
    for header, buffer in buckets[:-1]:
        assert list(reader.read(header, buffer)) == []
    with pytest.raises(BucketError, match=rf"{len(buckets) - 1} of {len(buckets)} buckets arrived.*'x'"):
        reader.finish(len(buckets))
    with pytest.raises(BucketError, match="corrupted"):
        list(BucketReader().read(replace(buckets[0][0], checksum="0" * 16), buckets[0][1]))


def test_names_come_once_and_tensors_are_dense() -> None:
    with pytest.raises(ValueError, match="'x' comes twice"):
        list(
            BucketPacker(bucket_bytes=256, buffer=lambda _, __: torch.empty(256, dtype=torch.uint8)).pack(
                [("x", torch.ones(1))] * 2
            )
        )
    with pytest.raises(ValueError, match="cannot be sent"):
        packed({"x": torch.ones(3).to_sparse()}, 256)
    with pytest.raises(ValueError, match="at least 64"):
        BucketPacker(bucket_bytes=63, buffer=lambda _, __: torch.empty(0))


def test_fused_groups_wait_for_their_last_member() -> None:
    groups = FusedGroups()
    buffer = torch.ones(2)
    assert groups.add("l.0.q_proj.weight", buffer) == []
    groups.secure()
    buffer.zero_()  # the bucket is written again
    assert groups.add("l.1.q_proj.weight", buffer) == []
    assert groups.add("norm", buffer) == [("norm", buffer)]
    assert groups.add("l.0.v_proj.weight", buffer) == []
    ready = dict(groups.add("l.0.k_proj.weight", buffer))
    assert list(ready) == ["l.0.q_proj.weight", "l.0.k_proj.weight", "l.0.v_proj.weight"]
    assert ready["l.0.q_proj.weight"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"l\.1\.q_proj.* came without .*l\.1\.k_proj"):
        groups.finish()


def test_d04_a_tied_head_arrives_whether_one_name_is_sent_or_both() -> None:
    """Embedding [[1,0],[0,1],[1,1]] plus 1; hidden state [1, 2]: logits 4, 5, 6."""
    embedding = torch.tensor([[1.0, 0], [0, 1], [1, 1]]) + 1
    tied = {"head": "embed"}
    for sent in (
        {"embed": embedding},
        {"embed": embedding, "head": embedding},
        {"head": embedding, "embed": embedding},
    ):
        got = dict(with_tied(without_tied(sent.items(), tied), tied))
        assert (got["head"] @ torch.tensor([1.0, 2.0])).tolist() == [4.0, 5.0, 6.0]
    with pytest.raises(ValueError, match="head is declared as tied to embed, but they differ"):
        list(without_tied({"embed": embedding, "head": embedding - 1}.items(), tied))


def test_a_topology_gives_each_receiver_one_sender() -> None:
    one = build_topology(trainer_world_size=4, receiver_ids=["a", "b", "c"])
    assert (one.sender_ranks, one.receivers_of(0), one.receivers_of(1)) == ((0,), ("a", "b", "c"), ())
    all_ = build_topology(trainer_world_size=2, receiver_ids=["a", "b", "c"], senders="all")
    assert (all_.receivers_of(0), all_.receivers_of(1)) == (("a", "c"), ("b",))
    many = build_topology(trainer_world_size=8, receiver_ids=["a", "b"], senders="all")
    assert (many.sender_ranks, many.receivers_of(5)) == ((0, 1), ())
    with pytest.raises(ValueError, match="names of their own"):
        build_topology(trainer_world_size=1, receiver_ids=["a", "a"])
    with pytest.raises(ValueError, match="needs senders and receivers"):
        build_topology(trainer_world_size=1, receiver_ids=[])
