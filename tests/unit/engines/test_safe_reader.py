"""A checkpoint cannot make the reader run code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_rlhf.engines.safe_reader import SafeFileSystemReader


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    tensors = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in dtypes}
    save(dict(tensors), checkpoint_id=tmp_path, no_dist=True)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(found, storage_reader=SafeFileSystemReader(tmp_path), no_dist=True)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


class _Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["ATTACK_MAKES"],)


def test_code_in_the_metadata_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made-by-the-attack"
    monkeypatch.setenv("ATTACK_MAKES", str(made))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Attack()))
    with pytest.raises(pickle.UnpicklingError, match=r"asks for .*mkdir"):
        SafeFileSystemReader(tmp_path).read_metadata()
    assert not made.exists()


def test_something_else_than_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(pickle.UnpicklingError, match="holds a dict"):
        SafeFileSystemReader(tmp_path).read_metadata()
