from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support.scripted import TOKENS_PER_STEP, ScriptedGRPO, scripted_fit
from support.tiny import tiny_tokenizer, write_tiny_model
from support.toy import toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import Throughput
from lightning_rlhf.metric_names import describe
from lightning_rlhf.types import PromptBatch


class SlowRollout(pl.Callback):
    """Stands for a rollout callback: takes its time before the step, and reports it."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: PromptBatch, batch_idx: int) -> None:
        with pl_module.timed("rollout"):
            time.sleep(0.05)


class Reader(pl.Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.metrics.append(dict(pl_module.last_metrics))


def test_the_rollout_counts_and_others_see_the_result_whatever_the_order(tmp_path: Path) -> None:
    reader = Reader()
    trainer = scripted_fit(ScriptedGRPO([0.0, 1.0]), tmp_path, [reader, SlowRollout(), Throughput()])
    assert [type(c).__name__ for c in trainer.callbacks[:3]] == ["Throughput", "Reader", "SlowRollout"]
    for metrics in reader.metrics:
        assert metrics["time/rollout"] >= 0.05
        assert metrics["time/step"] >= metrics["time/rollout"]
        assert metrics["time/other"] == pytest.approx(metrics["time/step"] - metrics["time/rollout"])
        assert metrics["throughput/tokens_per_second"] == pytest.approx(TOKENS_PER_STEP / metrics["time/step"])


def test_loggers_get_it_at_the_rl_step(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="csv", version=0)
    scripted_fit(ScriptedGRPO([0.0, 1.0]), tmp_path, [Throughput()], logger=logger)
    rows = list(csv.DictReader((tmp_path / "csv" / "version_0" / "metrics.csv").open()))
    assert [row["step"] for row in rows if row["time/step"]] == ["1", "2"]
    assert [row["step"] for row in rows if row["reward/mean"]] == ["1", "2"]


def test_mfu_by_hand(tmp_path: Path) -> None:
    module = toy_module(write_tiny_model(tmp_path / "model"), max_rl_steps=1, num_epochs=2)
    toy_trainer(tmp_path, callbacks=[Throughput(peak_flops=1e9)]).fit(module, toy_data())
    metrics = module.last_metrics
    parameters = sum(parameter.numel() for parameter in module.parameters())
    done = 6 * parameters * metrics["rollout/num_tokens"] * 2
    assert metrics["throughput/mfu"] == pytest.approx(done / metrics["time/update"] / 1e9)
    assert describe("throughput/mfu").unit == "fraction"
    with pytest.raises(ValueError, match="peak_flops must be positive, got 0"):
        Throughput(peak_flops=0)


def test_another_kind_of_module_is_refused_with_a_remedy(tmp_path: Path) -> None:
    class Other(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.tokenizer = tiny_tokenizer()

        def training_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(TypeError, match=r"Throughput reads the RL steps of an OnPolicyModule .* got Other"):
        scripted_fit(Other(), tmp_path, [Throughput()])
