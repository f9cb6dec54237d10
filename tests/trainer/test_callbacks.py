"""The callbacks that show and keep a run, on a real one: HF rollouts, GRPO, FSDP2 on two ranks."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import toy_data, toy_module, toy_trainer
from transformers import AutoModelForCausalLM

from lightning_rlhf.callbacks import HFExport, RLProgressBar, RunReport, SampleTable, Throughput


class Weights(pl.Callback):
    """Keeps the trained weights as the engine gives them."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.named = {name: tensor.clone() for name, tensor in pl_module.actor.get_per_tensor_param()}


def _fit(
    model: Path, root: Path, *, devices: int, strategy: str
) -> tuple[str, dict[str, torch.Tensor], dict[str, float]]:
    console = Console(file=io.StringIO(), width=120)
    weights = Weights()
    callbacks = [
        RLProgressBar(console=console),
        SampleTable(every_n_steps=2, console=console),
        RunReport(console=console),
        HFExport(console=console),
        Throughput(),
        weights,
    ]
    trainer = toy_trainer(root, callbacks=callbacks, enable_progress_bar=True, devices=devices, strategy=strategy)
    module = toy_module(model)
    trainer.fit(module, datamodule=toy_data())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue(), weights.named, module.last_metrics


def _check(text: str, weights: dict[str, torch.Tensor], metrics: dict[str, float], root: Path) -> None:
    lines = text.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split("  ")[0] for line in steps] == [f"step {i}/4" for i in (1, 2, 3, 4)]
    assert all("reward" in line and "tok/s" in line for line in steps)
    assert [line.strip() for line in lines if "Samples" in line] == [f"Samples of RL step {i}" for i in (1, 2, 4)]
    assert lines[-1].startswith("reward: start ")
    assert [row["rl_step"] for row in csv.DictReader((root / "reward.csv").open())] == ["1", "2", "3", "4"]
    assert (root / "reward_curve.png").exists()
    known = sum(metrics[name] for name in metrics if name.startswith("time/") and name != "time/step")
    assert abs(known - metrics["time/step"]) < 1e-6
    assert 0 <= metrics["time/other"] < metrics["time/step"]
    loaded = dict(AutoModelForCausalLM.from_pretrained(root / "hf").named_parameters())
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor)


def test_one_process(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    text, weights, metrics = _fit(model, tmp_path / "run", devices=1, strategy="auto")
    _check(text, weights, metrics, tmp_path / "run")


def test_two_ranks_of_fsdp2(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", tied=True)
    ranks = run_distributed(
        _fit, 2, model, tmp_path / "run", devices=2, strategy="fsdp2_rl", init_process_group=False, timeout=120
    )
    _check(*ranks[0], tmp_path / "run")
    assert ranks[1][0] == ""  # only rank 0 prints
