"""The examples run, learn, and differ from the fine-tuning project by at most 15 lines."""

from __future__ import annotations

import csv
import difflib
import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft_to_rl"
OWN_MODULES = ("data", "module", "rewards", "train_mixin")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs a script of the example in an empty folder, as ``python script.py arguments`` would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLE))

    def script(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLE / name), run_name="__main__")

    yield script
    for name in OWN_MODULES:  # names that another test might mean something else by
        sys.modules.pop(name, None)


def _column(run_dir: Path, name: str) -> list[float]:
    [file] = run_dir.rglob("metrics.csv")
    with file.open() as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row.get(name)]


def test_fine_tuning_then_grpo_then_the_mixin(run: Callable[..., None], tmp_path: Path, tiny_directory: Path) -> None:
    run("train_sft.py", str(tiny_directory), "sft")
    run("train_grpo.py", "sft/model.ckpt", "grpo")
    run("train_mixin.py", "sft/model.ckpt", "mixin")
    for name in ("grpo", "mixin"):
        rewards = _column(tmp_path / name, "reward/mean")
        assert len(rewards) == 15
        assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.15, rewards

    # with the mixin the learning rate is that of their configure_optimizers, warm-up and all
    rates = _column(tmp_path / "mixin", "lr-EngineOptimizer")
    assert rates[0] < 3e-3
    assert rates[-1] == 3e-3

    # and the checkpoint is one of their class again, name by name
    from module import CausalLMModule  # type: ignore[import-not-found]

    before = CausalLMModule.load_from_checkpoint("sft/model.ckpt").state_dict()
    after = CausalLMModule.load_from_checkpoint("mixin/model.ckpt", strict=True).state_dict()
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.lm_head.weight"], after["model.lm_head.weight"])


@pytest.mark.skipif(
    importlib.util.find_spec("jsonargparse") is None, reason="LightningCLI needs jsonargparse[signatures]"
)
def test_lightning_cli(run: Callable[..., None], tmp_path: Path, tiny_directory: Path) -> None:
    config = str(EXAMPLE / "grpo.yaml")
    run("cli.py", "fit", "--config", config, "--model.model_name", str(tiny_directory), "--trainer.max_epochs", "1")
    assert len(_column(tmp_path / "out", "reward/mean")) == 3


@pytest.mark.parametrize(
    ("before", "after"),
    [("train_sft.py", "train_grpo.py"), ("train_sft.py", "train_mixin.py"), ("sft.yaml", "grpo.yaml")],
)
def test_the_difference_is_at_most_fifteen_lines(before: str, after: str) -> None:
    texts = [(EXAMPLE / name).read_text().splitlines() for name in (before, after)]
    diff = [line for line in difflib.unified_diff(*texts, n=0) if not line.startswith(("---", "+++", "@@"))]
    changed = [line for line in diff if line[1:].strip()]
    assert 5 < len(changed) <= 15, "\n".join(changed)


def test_the_mixin_takes_at_most_ten_lines() -> None:
    text = (EXAMPLE / "train_mixin.py").read_text()
    [block] = [part for part in text.split("\n\n\n") if part.startswith("class RLModule")]
    assert len(block.splitlines()) <= 10
