"""Files that are written tensor by tensor, read by the format's own package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from lightning_rlhf.weights.tensor_file import _NAMES, HEADER_BYTES, TensorFile


def test_every_dtype_and_shape_is_read_back(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(24).remainder(2).to(dtype).reshape(2, 3, 4) for dtype in _NAMES
    }  # largest elements first: all are aligned
    tensors |= {"scalar": torch.tensor(3, dtype=torch.uint8), "empty": torch.zeros(0, 5), "turned": torch.rand(3, 7).T}
    path = tmp_path / "some.safetensors"
    file = TensorFile(path)
    for name in sorted(tensors, key=lambda one: -tensors[one].element_size()):
        assert file.takes(name, tensors[name])
        file.add(name, tensors[name])
    file.close()
    got = load_file(path)
    assert set(got) == set(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert got[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert path.stat().st_size == HEADER_BYTES + sum(tensor.nbytes for tensor in tensors.values())


def test_what_would_not_be_aligned_goes_to_another_file(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "some.safetensors")
    file.add("odd", torch.zeros(3, dtype=torch.uint8))
    assert file.takes("bytes", torch.zeros(2, dtype=torch.uint8))
    assert not file.takes("words", torch.zeros(2))
    with pytest.raises(ValueError, match="words: there is no room for it"):
        file.add("words", torch.zeros(2))
    file.discard()


def test_the_header_never_outgrows_its_room(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    file = TensorFile(path)
    one, count = torch.ones(1, 1, 1), 0
    while file.takes(f"{'ü' * 20}{count}", one):  # six bytes each in JSON
        file.add(f"{'ü' * 20}{count}", one)
        count += 1
    file.close()
    assert 200 < count < HEADER_BYTES // 120
    assert len(load_file(path)) == count


def test_a_file_that_was_not_finished_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    file = TensorFile(path)
    file.add("one", torch.ones(5))
    file.discard()
    with pytest.raises(SafetensorError):
        load_file(path)


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "some.safetensors")
    with pytest.raises(ValueError, match=r"one: torch.complex128 is not written to files; known: torch.float64"):
        file.add("one", torch.ones(5, dtype=torch.complex128))
    file.discard()
