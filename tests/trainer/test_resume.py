"""kill -9 in the middle of an RL step, then ckpt_path="last": the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.fork import DistributedError, run_distributed
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import RLCheckpoint
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback

STEPS = 7
KILLED_IN = 4
LAYOUTS = [("auto", 1), ("fsdp2_rl", 2)]


class KillInStep(RLCallback):
    """Ends the process after the optimizer stepped and before the RL step is done, without any cleaning up."""

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        if step.rl_step == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)


def _run(
    root: Path,
    model: Path,
    strategy: str,
    devices: int,
    *,
    kill: bool = False,
    ckpt_path: str | None = None,
    every: int = 1,
) -> dict[str, Any]:
    recorder = Recorder()
    callbacks: list[pl.Callback] = [recorder, RLCheckpoint(every_n_rl_steps=every), *([KillInStep()] if kill else [])]
    pl.seed_everything(11, verbose=False)
    trainer = toy_trainer(root, callbacks=callbacks, strategy=strategy, devices=devices)
    grpo = toy_module(
        model,
        max_rl_steps=STEPS,
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step)),
        mini_batch_size=8,
    )
    trainer.fit(grpo, toy_data(), ckpt_path=ckpt_path)
    return {
        "steps": recorder.steps,
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
        "global_step": trainer.global_step,
        "policy_version": grpo.policy_version,
        "rng": torch.rand(3).tolist(),
    }


def _ranks(root: Path, model: Path, layout: tuple[str, int], **settings: Any) -> list[dict[str, Any]]:
    strategy, devices = layout
    return run_distributed(
        _run, devices, root, model, strategy, devices, init_process_group=False, timeout=120.0, **settings
    )


def _assert_equal(resumed: dict[str, Any], unbroken: dict[str, Any]) -> None:
    assert resumed["steps"] == unbroken["steps"][-len(resumed["steps"]) :]
    assert resumed["global_step"] == unbroken["global_step"] == 2 * STEPS
    assert resumed["policy_version"] == unbroken["policy_version"] == 2 * STEPS
    assert resumed["rng"] == unbroken["rng"]
    for name, value in unbroken["parameters"].items():
        assert (resumed["parameters"][name] == value).all(), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[1]}")
def test_f08_a_killed_run_resumes_bit_for_bit(tmp_path: Path, tiny_directory: Path, layout: tuple[str, int]) -> None:
    unbroken = _ranks(tmp_path / "unbroken", tiny_directory, layout)
    with pytest.raises(DistributedError):
        _ranks(tmp_path / "killed", tiny_directory, layout, kill=True)
    resumed = _ranks(tmp_path / "killed", tiny_directory, layout, ckpt_path="last")
    for mine, reference in zip(resumed, unbroken, strict=True):
        assert [step["rl_step"] for step in mine["steps"]] == [5, 6, 7]
        # the first rollout is sampled from the restored weights and tagged with their version
        assert mine["steps"][0]["versions"] == [2 * KILLED_IN]
        _assert_equal(mine, reference)


def test_a_checkpoint_between_epochs_or_in_one_continues_alike(tmp_path: Path, tiny_directory: Path) -> None:
    """Three steps an epoch; checkpoints every two RL steps fall inside an epoch and at its end."""
    unbroken = _run(tmp_path / "unbroken", tiny_directory, "auto", 1, every=2)
    with pytest.raises(DistributedError):
        _ranks(tmp_path / "killed", tiny_directory, ("auto", 1), kill=True, every=2)
    checkpoint = tmp_path / "killed" / "checkpoints" / f"rl_step={KILLED_IN:06d}.ckpt"
    assert checkpoint.exists()
    _assert_equal(_run(tmp_path / "killed", tiny_directory, "auto", 1, ckpt_path=str(checkpoint), every=2), unbroken)


def test_f07_two_ranks_resume_on_one(tmp_path: Path, tiny_directory: Path) -> None:
    unbroken = _ranks(tmp_path / "unbroken", tiny_directory, ("fsdp2_rl", 2))
    with pytest.raises(DistributedError):
        _ranks(tmp_path / "killed", tiny_directory, ("fsdp2_rl", 2), kill=True)
    (resumed,) = _ranks(tmp_path / "killed", tiny_directory, ("fsdp2_rl", 1), ckpt_path="last")
    seen = [sorted(step["uids"]) for step in resumed["steps"]]
    expected = [
        sorted(uid for rank in unbroken for uid in rank["steps"][index]["uids"]) for index in range(KILLED_IN, STEPS)
    ]
    assert seen == expected  # no prompt repeated or lost
    for name, value in unbroken[0]["parameters"].items():
        assert torch.allclose(torch.tensor(resumed["parameters"][name]), torch.tensor(value), atol=1e-5), name


def test_f03_a_half_written_checkpoint_is_not_last(tmp_path: Path, tiny_directory: Path) -> None:
    layout = ("fsdp2_rl", 1)
    with pytest.raises(DistributedError):
        _ranks(tmp_path, tiny_directory, layout, kill=True)
    folder = tmp_path / "checkpoints"
    whole = folder / "rl_step=000004.ckpt"
    assert [path.name for path in folder.iterdir()] == [whole.name]
    cut = folder / "rl_step=000006.ckpt"
    shutil.copytree(whole, cut)
    tensors = next((cut / "actor").glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-10])
    (resumed,) = _ranks(tmp_path, tiny_directory, layout, ckpt_path="last")
    assert [step["rl_step"] for step in resumed["steps"]] == [5, 6, 7]
    with pytest.raises(DistributedError, match="not a whole checkpoint"):
        _ranks(tmp_path, tiny_directory, layout, ckpt_path=str(cut))


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, tiny_directory: Path) -> None:
    first = _run(tmp_path, tiny_directory, "auto", 1)
    again = _run(tmp_path, tiny_directory, "auto", 1, ckpt_path="last")
    assert again["steps"] == []
    for name, value in first["parameters"].items():
        assert (again["parameters"][name] == value).all()
