"""What loggers hold of a run, read back from their own files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from support import wandb_file
from support.scripted import ScriptedGRPO, scripted_data, scripted_fit

from lightning_rlhf.callbacks import RLCheckpoint, SampleTable, Throughput
from lightning_rlhf.cli.run_records import read_history

REWARDS = [0.0, 0.25, 0.5, 0.75]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    return wandb


def fit(folder: Path, logger: Any, *, steps: int, **changes: Any) -> None:
    callbacks = [Throughput(), SampleTable(every_n_steps=2, console=Console(file=io.StringIO()))]
    callbacks += [RLCheckpoint(every_n_rl_steps=1)]
    scripted_fit(
        ScriptedGRPO(REWARDS, max_rl_steps=steps), folder, callbacks, data=scripted_data(), logger=logger,
        enable_checkpointing=True, **changes,
    )  # fmt: skip


def test_i04_an_offline_wandb_run_holds_every_metric_over_rl_steps(tmp_path: Path, wandb: Any) -> None:
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(save_dir=tmp_path, project="p", id="first", offline=True)
    fit(tmp_path, logger, steps=2)
    wandb.finish()
    resumed = WandbLogger(save_dir=tmp_path, project="p", id="first", resume="allow", offline=True)
    fit(tmp_path, resumed, steps=4, ckpt_path="last")
    wandb.finish()

    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == ["run-first.wandb"] * 2
    for file, steps in zip(files, ([1, 2], [3, 4]), strict=True):
        assert wandb_file.axes(file)["*"] == "rl_step"
        rows = wandb_file.history(file)
        rewards = {int(row["rl_step"]): row["reward/mean"] for row in rows if "reward/mean" in row}
        assert rewards == {step: REWARDS[step - 1] for step in steps}
        assert len([row for row in rows if "time/step" in row]) == len(steps)
        tables = [(row["rl_step"], row["samples/nrows"]) for row in rows if row.get("samples/_type") == "table-file"]
        assert tables == ([(1, 2), (2, 2)] if steps[0] == 1 else [(4, 2)])
        # W&B's own counter only rises: nothing is dropped for going back
        counters = [row["_step"] for row in rows]
        assert counters == sorted(set(counters))


def test_tensorboard_and_csv_hold_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [TensorBoardLogger(tmp_path, name="tensorboard"), CSVLogger(tmp_path, name="csv")]
    fit(tmp_path, loggers, steps=4)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "version_0"))
    events.Reload()
    written = read_history(tmp_path)
    assert written["reward/mean"] == dict(enumerate(REWARDS, start=1))
    assert set(events.Tags()["scalars"]) - {"hp_metric", "epoch", "rl_step"} == set(written) - {"epoch"}
    for name, values in written.items():
        if name == "epoch":
            continue
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx(values, rel=1e-5), name
