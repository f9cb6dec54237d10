"""``async_save=True``: training goes on beside the writer, and what it wrote is whole, exact, or absent."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.fork import DistributedError, run_distributed
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import RLCheckpoint
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.engines import checkpoint as engine_checkpoint
from lightning_rlhf.strategies import FSDP2RLStrategy, checkpoints
from lightning_rlhf.strategies.background import BackgroundSave

STEPS = 5
LONGEST_HOLD = 60.0
"""Seconds, far more than a run takes: a writer that training waits for fails instead of passing by chance."""


class Held(RLCallback):
    """Holds the second checkpoint's writer back until the RL step after it has stepped; then frees it or kills all."""

    def __init__(self, *, kill: bool) -> None:
        self.kill = kill
        self.released = threading.Event()
        self.written_in: list[str] = []
        self.pending_in_the_next_step = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        write = engine_checkpoint.dcp_save

        def held(*args: Any, **kwargs: Any) -> Any:
            self.written_in.append(threading.current_thread().name)
            if len(self.written_in) == 2 and not self.released.wait(LONGEST_HOLD):
                raise TimeoutError("Training did not go on beside the writer.")
            return write(*args, **kwargs)

        vars(engine_checkpoint)["dcp_save"] = held  # this process is a fork of its own

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        if step.rl_step == 4 and not self.released.is_set():
            assert isinstance(trainer.strategy, FSDP2RLStrategy)
            self.pending_in_the_next_step = trainer.strategy.background.pending
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            self.released.set()


def _run(
    root: Path, model: Path, *, async_save: bool, held: bool = False, kill: bool = False, ckpt_path: str | None = None
) -> dict[str, Any]:
    recorder, hold = Recorder(), Held(kill=kill)
    callbacks: list[pl.Callback] = [recorder, RLCheckpoint(every_n_rl_steps=2, save_top_k=2), *([hold] if held else [])]
    pl.seed_everything(11, verbose=False)
    strategy = FSDP2RLStrategy(async_save=async_save)
    trainer = toy_trainer(root, callbacks=callbacks, strategy=strategy, devices=2)
    grpo = toy_module(model, max_rl_steps=STEPS, mini_batch_size=8)
    trainer.fit(grpo, toy_data(), ckpt_path=ckpt_path)
    return {
        "steps": recorder.steps,
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
        "written_in": hold.written_in,
        "pending_in_the_next_step": hold.pending_in_the_next_step,
        "pending": strategy.background.pending,
    }


def _ranks(root: Path, model: Path, **settings: Any) -> list[dict[str, Any]]:
    return run_distributed(_run, 2, root, model, init_process_group=False, timeout=120.0, **settings)


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").iterdir())


def _checksums_of_tensors(root: Path) -> dict[str, int]:
    manifest = json.loads((root / "checkpoints" / "rl_step=000004.ckpt" / "manifest.json").read_text())
    return {name: crc for name, crc in manifest["crc32"].items() if name.endswith(".distcp")}


def test_training_goes_on_beside_the_writer_and_a_kill_leaves_the_one_before(
    tmp_path: Path, tiny_directory: Path
) -> None:
    unbroken = _ranks(tmp_path / "unbroken", tiny_directory, async_save=False)
    beside = _ranks(tmp_path / "beside", tiny_directory, async_save=True, held=True)
    with pytest.raises(DistributedError):
        _ranks(tmp_path / "killed", tiny_directory, async_save=True, held=True, kill=True)
    whole, *others = _names(tmp_path / "killed")
    assert whole == "rl_step=000002.ckpt"
    assert set(others) <= {"rl_step=000004.ckpt.part"}
    resumed = _ranks(tmp_path / "killed", tiny_directory, async_save=True, ckpt_path="last")
    for mine, other, reference in zip(resumed, beside, unbroken, strict=True):
        assert other["written_in"] == ["checkpoint-writer"] * 3
        assert other["pending_in_the_next_step"]  # step 4's checkpoint while step 5 trains
        assert not other["pending"]
        assert not mine["pending"]
        assert other["steps"] == reference["steps"]
        assert mine["steps"] == reference["steps"][2:]
        for name, value in reference["parameters"].items():
            assert (other["parameters"][name] == value).all(), name
            assert (mine["parameters"][name] == value).all(), name
    kept = ["rl_step=000004.ckpt", "rl_step=000005.ckpt"]
    assert _names(tmp_path / "beside") == _names(tmp_path / "killed") == _names(tmp_path / "unbroken") == kept
    # written after step 5 had changed the parameters: what was written is the copy
    assert _checksums_of_tensors(tmp_path / "beside") == _checksums_of_tensors(tmp_path / "unbroken")


def _fail_on_rank_1(root: Path, model: Path) -> tuple[int, str]:
    checksums, rank_1_saves = checkpoints._checksums, 0

    def full(folder: Path, files: list[str]) -> dict[str, int]:
        nonlocal rank_1_saves
        rank_1_saves += strategy.global_rank == 1
        if rank_1_saves == 2:
            raise OSError(28, "No space left on device")
        return checksums(folder, files)

    vars(checkpoints)["_checksums"] = full
    strategy, recorder = FSDP2RLStrategy(async_save=True), Recorder()
    callbacks = [recorder, RLCheckpoint(every_n_rl_steps=2)]
    trainer = toy_trainer(root, callbacks=callbacks, strategy=strategy, devices=2)
    with pytest.raises(RuntimeError, match="could not be written on every rank") as failure:
        trainer.fit(toy_module(model, max_rl_steps=STEPS), toy_data())
    assert not strategy.background.pending
    return len(recorder.steps), str(failure.value)


def test_a_writers_error_is_raised_at_the_next_save_and_the_checkpoint_before_stays(
    tmp_path: Path, tiny_directory: Path
) -> None:
    found = run_distributed(_fail_on_rank_1, 2, tmp_path, tiny_directory, init_process_group=False, timeout=120.0)
    assert [steps for steps, _ in found] == [STEPS, STEPS]  # step 4's was raised where step 5's was to be saved
    assert all("rl_step=000004.ckpt" in message for _, message in found)
    assert "No space left on device" in found[1][1]
    assert _names(tmp_path) == ["rl_step=000002.ckpt"]


def test_one_writer_at_a_time_and_its_error_once() -> None:
    save, released, written = BackgroundSave(), threading.Event(), []

    def write() -> None:
        assert released.wait(LONGEST_HOLD)
        written.append(threading.current_thread().name)
        raise OSError("full")

    assert not save.wait()  # there was none
    save.start(write)
    assert save.pending
    with pytest.raises(RuntimeError, match="still being written"):
        save.start(write)
    released.set()
    with pytest.raises(OSError, match="full"):
        save.wait()
    assert written == ["checkpoint-writer"]
    assert not save.pending
    assert not save.wait()
