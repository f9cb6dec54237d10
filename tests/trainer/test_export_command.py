"""``lightning-rlhf export`` on checkpoints that real runs wrote."""

from __future__ import annotations

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.fork import run_distributed
from support.toy import parameters_of, toy_data, toy_module, toy_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.callbacks import RLCheckpoint
from lightning_rlhf.cli.export import main
from lightning_rlhf.cli.run_checkpoints import find_checkpoint
from lightning_rlhf.cli.run_records import RecordError


def _fit(root: Path, model: Path, strategy: str, devices: int) -> dict[str, Any]:
    trainer = toy_trainer(root, callbacks=[RLCheckpoint(every_n_rl_steps=1)], strategy=strategy, devices=devices)
    module = toy_module(model, max_rl_steps=2)
    trainer.fit(module, toy_data())
    return {name: tensor.numpy() for name, tensor in parameters_of(module).items()}


def _run(tmp_path: Path, model: Path, layout: tuple[str, int]) -> tuple[Path, dict[str, np.ndarray]]:
    root = tmp_path / "run"
    (weights, *_) = run_distributed(_fit, layout[1], root, model, *layout, init_process_group=False, timeout=120)
    (root / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(model)}}))
    return root, weights


def _main(arguments: list[str]) -> tuple[int, str]:
    with redirect_stdout(StringIO()) as printed:
        code = main(arguments)
    return code, printed.getvalue()


def _export(*arguments: str) -> tuple[int, str]:
    """The command in a process of its own, as it is meant to run: it makes a process group to read megatron's files."""
    (result,) = run_distributed(_main, 1, list(arguments), init_process_group=False, timeout=120)
    return result


@pytest.mark.parametrize("layout", [("auto", 1), ("fsdp2_rl", 2), ("megatron_rl", 2)], ids=lambda layout: layout[0])
def test_the_directory_holds_what_was_trained(tmp_path: Path, tiny_directory: Path, layout: tuple[str, int]) -> None:
    root, weights = _run(tmp_path, tiny_directory, layout)
    out = tmp_path / "hf"
    code, printed = _export(str(root), "--out", str(out))
    assert (code, printed.strip()) == (0, str(out))
    loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert loaded.keys() == weights.keys()
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_directory).named_parameters())
    for name, value in weights.items():
        assert np.array_equal(loaded[name].detach().numpy(), value), name
    assert any(not torch.equal(loaded[name], start[name]) for name in start)
    assert AutoTokenizer.from_pretrained(out).encode("1+1") == AutoTokenizer.from_pretrained(tiny_directory).encode(
        "1+1"
    )

    code, _ = _export(str(find_checkpoint(root)), "--out", str(tmp_path / "bf16"), "--dtype", "bfloat16")
    assert code == 0
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert rounded.dtype == torch.bfloat16
    name, value = next(iter(weights.items()))
    assert torch.equal(dict(rounded.named_parameters())[name], torch.from_numpy(value).bfloat16())


def test_what_cannot_be_exported_is_refused_by_name(
    tmp_path: Path, tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = _run(tmp_path, tiny_directory, ("fsdp2_rl", 1))
    checkpoint = find_checkpoint(root)
    out = ["--out", str(tmp_path / "hf")]

    def refused(*arguments: str) -> str:
        assert main([*arguments, *out]) == 2
        assert not (tmp_path / "hf" / "config.json").exists()
        return capsys.readouterr().err

    assert "not an adapter; leave out --adapter" in refused(str(root), "--adapter")
    assert "neither a checkpoint nor the folder of a run" in refused(str(tmp_path / "nowhere"))
    assert "dtype must name a floating dtype" in refused(str(root), "--dtype", "int8")
    (root / "config.yaml").rename(tmp_path / "config.yaml")
    assert "--model DIR" in refused(str(root))
    assert main([str(root), "--model", str(tiny_directory), "--out", str(tmp_path / "with_model")]) == 0

    cut = root / "checkpoints" / "rl_step=000009.ckpt"
    shutil.copytree(checkpoint, cut)
    tensors = next((cut / "actor").glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-10])
    assert find_checkpoint(root) == checkpoint  # the newest whole one
    assert "not a whole checkpoint" in refused(str(cut), "--model", str(tiny_directory))
    shutil.rmtree(checkpoint)
    with pytest.raises(RecordError, match=r"none of rl_step=000009\.ckpt is whole"):
        find_checkpoint(root)


def test_what_a_megatron_checkpoint_lacks_is_named(
    tmp_path: Path, tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "rl_step=000001.ckpt"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"files": {}, "backend": "megatron"}))
    assert main([str(folder), "--model", str(tiny_directory), "--out", str(tmp_path / "hf")]) == 2
    assert "holds no model of the megatron back end" in capsys.readouterr().err
    assert main([str(folder), "--adapter", "--model", str(tiny_directory), "--out", str(tmp_path / "hf")]) == 2
    assert "trains no adapter; leave out --adapter" in capsys.readouterr().err


def test_a_file_of_another_program_is_refused(
    tmp_path: Path, tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state_dict": {"layer.weight": torch.zeros(1)}}, tmp_path / "other.ckpt")
    assert main([str(tmp_path / "other.ckpt"), "--model", str(tiny_directory), "--out", str(tmp_path / "hf")]) == 2
    assert "holds no actor of this package" in capsys.readouterr().err
