"""Tensors one by one: headers, and where they land."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_rlhf.weights.bucket_header import DTYPES, BucketError
from lightning_rlhf.weights.whole_tensors import WholeTensorReader, with_headers


def new_reader(**destinations: Tensor) -> WholeTensorReader:
    reader = WholeTensorReader(before_reuse=lambda: None)
    reader.restart(destinations)
    return reader


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (0, 5), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    content = torch.randint(0, 256, (DTYPES[dtype].itemsize * torch.Size(shape).numel(),), dtype=torch.uint8)
    tensor = content.view(DTYPES[dtype]).view(shape)
    for destination in ({}, {"w": torch.zeros_like(tensor)}):
        [(header, sent)] = with_headers([("w", tensor)])
        name, arrived, memory = new_reader(**destination).landing(header)
        memory.copy_(sent)
        assert (name, arrived.dtype, arrived.shape) == ("w", tensor.dtype, tensor.shape)
        assert torch.equal(arrived.reshape(-1).view(torch.uint8), content)
        assert not destination or arrived is destination["w"]


def test_it_lands_in_its_destination_only_if_that_is_like_it() -> None:
    like, [(header, _)] = torch.zeros(2, 3), with_headers([("w", torch.ones(2, 3))])
    assert new_reader(w=like).landing(header)[1] is like
    for unlike in (
        torch.zeros(3, 2),
        torch.zeros(2, 3).bfloat16(),
        torch.zeros(3, 2).T,
        torch.zeros(2, 3, device="meta"),
    ):
        _, arrived, memory = new_reader(w=unlike).landing(header)
        assert arrived is not unlike
        assert memory.shape == (24,)
        assert arrived.shape == (2, 3)


def test_a_part_of_a_larger_tensor_at_an_odd_place_is_a_destination() -> None:
    whole, [(header, sent)] = torch.zeros(9, dtype=torch.bfloat16), with_headers([("w", torch.ones(5).bfloat16())])
    _, arrived, memory = new_reader(w=whole[3:8]).landing(header)
    memory.copy_(sent)
    assert whole.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert arrived.tolist() == [1] * 5


def test_one_element_may_have_any_stride() -> None:
    one, [(header, sent)] = torch.zeros(10)[::7][:1], with_headers([("w", torch.ones(10)[::7][:1])])
    _, arrived, memory = new_reader(w=one).landing(header)
    memory.copy_(sent)
    assert arrived is one
    assert one.tolist() == [1.0]


def test_memory_is_kept_and_whoever_holds_what_lies_there_is_told() -> None:
    told: list[int] = []
    reader = WholeTensorReader(before_reuse=lambda: told.append(1))
    reader.restart({})
    headers = [header for header, _ in with_headers([(str(size), torch.zeros(size)) for size in (8, 4, 10, 9)])]
    places = [reader.landing(header)[2].data_ptr() for header in headers]
    assert len(told) == 4
    assert places[0] == places[1]
    assert places[2] == places[3]
    reader.finish(4)
    with pytest.raises(BucketError, match="4 of 5 tensors arrived"):
        reader.finish(5)
    with pytest.raises(BucketError, match="came twice"):
        reader.landing(headers[0])


@pytest.mark.parametrize(
    "header", [b"", b"{", b"[]", b'["w", "float32"]', b'["w", "float32", 3]', b'["w", "float32", ["x"]]', b"7", b"\xff"]
)
def test_a_header_that_cannot_be_read(header: bytes) -> None:
    with pytest.raises(BucketError, match="cannot be read"):
        new_reader().landing(header)


@pytest.mark.parametrize("header", [b'["w", "float31", [3]]', b'["w", "float32", [3, -1]]', b'["w", [], [3]]'])
def test_a_header_is_not_believed(header: bytes) -> None:
    with pytest.raises(BucketError, match=r"w: .* is unknown here; known: float64"):
        new_reader().landing(header)


def test_names_come_once_and_tensors_are_dense() -> None:
    with pytest.raises(ValueError, match="'w' comes twice"):
        list(with_headers([("w", torch.zeros(1)), ("w", torch.zeros(1))]))
    with pytest.raises(ValueError, match="sparse"):
        list(with_headers([("w", torch.eye(3).to_sparse())]))
