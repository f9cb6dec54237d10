"""The Trainer's hooks: what is called when, and what is refused before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from support.fork import run_distributed
from support.toy import Recorder, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import HFRollout, RLCheckpoint, WeightSync
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.strategies import FSDP2RLStrategy
from lightning_rlhf.types import PromptBatch


class HookOrder(RLCallback):
    """Writes down hooks and steps, and whether the weights had moved by then."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.steps: list[OptimizerStep] = []
        self._before: torch.Tensor | None = None

    def _weight(self, module: Any) -> torch.Tensor:
        return next(iter(module.actor.get_per_tensor_param()))[1].clone()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._before = self._weight(pl_module)
        self.events.append("before")

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        assert self._before is not None
        moved = not torch.equal(self._before, self._weight(pl_module))
        self.events.append(f"after moved={moved}")
        self.steps.append(step)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.events.append("batch_end")


def test_the_after_step_hook_sees_every_step_with_moved_weights(tmp_path: Path, tiny_directory: Path) -> None:
    order = HookOrder()
    toy_trainer(tmp_path, callbacks=[order]).fit(
        toy_module(tiny_directory, mini_batch_size=8, max_rl_steps=2), toy_data()
    )
    assert order.events == ["before", "after moved=True", "before", "after moved=True", "batch_end"] * 2
    assert [(s.role, s.stepped, s.index, s.is_last, s.rl_step) for s in order.steps] == [
        ("actor", True, 0, False, 0),
        ("actor", True, 1, True, 0),
        ("actor", True, 0, False, 1),
        ("actor", True, 1, True, 1),
    ]


@pytest.mark.parametrize(("every", "pushes"), [("optimizer_step", 7), ("rollout", 3)])
def test_weight_sync_pushes_when_it_is_told_to(tmp_path: Path, tiny_directory: Path, every: Any, pushes: int) -> None:
    """One push before the first rollout; then after each of six steps, or before each of two more rollouts."""
    sync, recorder = WeightSync(every=every), Recorder()
    trainer = toy_trainer(tmp_path, callbacks=[sync, recorder], weight_sync=False)
    trainer.fit(toy_module(tiny_directory, mini_batch_size=8, max_rl_steps=3), toy_data())
    assert sync._manager is not None
    assert sync._manager.num_pushes == pushes
    assert [step["versions"] for step in recorder.steps] == [[0], [2], [4]]


def test_a_skipped_step_changes_no_version_and_is_counted(tmp_path: Path, tiny_directory: Path) -> None:
    recorder, order = Recorder(), HookOrder()
    module = toy_module(tiny_directory, max_rl_steps=2)
    loss = module.policy_loss

    def broken_once(outputs: Any, micro_batch: Any) -> Any:
        result = loss(outputs, micro_batch)
        if module.rl_step == 0:
            result.terms = result.terms * float("nan")
        return result

    module.policy_loss = broken_once  # type: ignore[method-assign]
    toy_trainer(tmp_path, callbacks=[order, recorder]).fit(module, toy_data())
    assert [step.stepped for step in order.steps] == [False, True]
    assert [step["metrics"]["actor/skipped_steps"] for step in recorder.steps] == [1.0, 0.0]
    assert [step["versions"] for step in recorder.steps] == [[0], [0]]
    assert module.policy_version == 1


@pytest.mark.parametrize("order", [0, 1])
def test_the_order_of_rollout_and_weight_sync_does_not_matter(tmp_path: Path, tiny_directory: Path, order: int) -> None:
    recorder = Recorder()
    pair = [HFRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64), WeightSync()]
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=-1,
        default_root_dir=tmp_path,
        callbacks=[*(pair if order else pair[::-1]), recorder],
    )
    trainer.fit(toy_module(tiny_directory, max_rl_steps=2), toy_data())
    assert [step["versions"] for step in recorder.steps] == [[0], [1]]


def test_a_rollout_without_weight_sync_is_refused(tmp_path: Path, tiny_directory: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("Add rl.WeightSync() to Trainer")):
        toy_trainer(tmp_path, weight_sync=False).fit(toy_module(tiny_directory), toy_data())


def test_a_rollout_may_say_that_it_wants_no_sync(tmp_path: Path, tiny_directory: Path) -> None:
    recorder = Recorder()
    rollout = HFRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64, weight_sync=False)
    trainer = toy_trainer(tmp_path, callbacks=[recorder], rollout=rollout, weight_sync=False)
    trainer.fit(toy_module(tiny_directory, max_rl_steps=3), toy_data())
    assert [step["versions"] for step in recorder.steps] == [[0], [0], [0]]
    # sampled from older weights than the trainer's: the mismatch says so
    assert recorder.steps[2]["metrics"]["actor/mismatch_abs_mean"] > 1e-3


def test_two_rollout_callbacks_are_refused(tmp_path: Path, tiny_directory: Path) -> None:
    extra = HFRollout()
    with pytest.raises(ValueError, match="needs one rollout callback"):
        toy_trainer(tmp_path, callbacks=[extra]).fit(toy_module(tiny_directory), toy_data())


def test_no_rollout_callback_is_named_in_the_error(tmp_path: Path, tiny_directory: Path) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    with pytest.raises(RuntimeError, match="holds no rollouts"):
        trainer.fit(toy_module(tiny_directory), toy_data())


def test_a_batch_that_kept_its_rollouts_is_refused(tmp_path: Path, tiny_directory: Path) -> None:
    class Keeps(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: PromptBatch, batch_idx: int) -> None:
            batch.rollouts = object()  # type: ignore[assignment]

    rollout = HFRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        callbacks=[Keeps(), rollout, WeightSync()],
    )
    with pytest.raises(RuntimeError, match="holds rollouts already"):
        trainer.fit(toy_module(tiny_directory), toy_data())


def test_g02_batch_sizes_are_checked_before_the_first_rollout(tmp_path: Path, tiny_directory: Path) -> None:
    with pytest.raises(ValueError, match=r"mini_batch_size=5"):
        toy_trainer(tmp_path).fit(toy_module(tiny_directory, mini_batch_size=5), toy_data())


def test_metrics_reach_the_logger_at_every_rl_step(tmp_path: Path, tiny_directory: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = toy_trainer(tmp_path, logger=logger)
    trainer.fit(toy_module(tiny_directory, max_rl_steps=3), toy_data())
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    columns = lines[0].split(",")
    steps = [line.split(",")[columns.index("step")] for line in lines[1:]]
    assert steps == ["1", "2", "3"]
    assert all(line.split(",")[columns.index("reward/mean")] for line in lines[1:])


def test_callbacks_of_lightning_work_beside_ours(tmp_path: Path, tiny_directory: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = toy_trainer(tmp_path, callbacks=[LearningRateMonitor("step")], logger=logger, log_every_n_steps=1)
    trainer.fit(toy_module(tiny_directory, max_rl_steps=2), toy_data())
    assert "lr-EngineOptimizer" in (Path(logger.log_dir) / "metrics.csv").read_text()


def test_checkpoints_count_rl_steps_and_not_optimizer_steps(tmp_path: Path, tiny_directory: Path) -> None:
    checkpoint = RLCheckpoint(every_n_rl_steps=2, save_top_k=-1)
    trainer = toy_trainer(tmp_path, callbacks=[checkpoint])
    trainer.fit(toy_module(tiny_directory, mini_batch_size=8, max_rl_steps=5), toy_data())
    assert trainer.global_step == 10
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"rl_step={step:06d}.ckpt" for step in (2, 4, 5)]


def test_only_the_newest_checkpoint_is_kept_by_default(tmp_path: Path, tiny_directory: Path) -> None:
    trainer = toy_trainer(tmp_path, callbacks=[RLCheckpoint(every_n_rl_steps=1)])
    trainer.fit(toy_module(tiny_directory, max_rl_steps=3), toy_data())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["rl_step=000003.ckpt"]


def test_max_steps_takes_effect_at_the_next_rl_step(tmp_path: Path, tiny_directory: Path) -> None:
    module = toy_module(tiny_directory, mini_batch_size=8, max_rl_steps=None)
    trainer = toy_trainer(tmp_path, max_steps=3)
    trainer.fit(module, toy_data())
    assert (module.rl_step, trainer.global_step) == (2, 4)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_precisions_that_would_change_the_update_are_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=f"precision='{precision}'.*'32-true' or 'bf16-mixed'"):
        pl.Trainer(accelerator="cpu", strategy=FSDP2RLStrategy(), precision=precision, logger=False)


def _fit_with_sizes(root: Path, model: Path) -> str:
    strategy = FSDP2RLStrategy(dp_shard_size=3)
    try:
        toy_trainer(root, strategy=strategy, devices=2).fit(toy_module(model), toy_data())
    except ValueError as error:
        return str(error)
    return ""


def test_sizes_that_do_not_fit_the_processes_are_refused(tmp_path: Path, tiny_directory: Path) -> None:
    for message in run_distributed(_fit_with_sizes, 2, tmp_path, tiny_directory, init_process_group=False):
        assert "dp_shard_size=3" in message
        assert "2 process(es)" in message


def _hybrid(root: Path, model: Path) -> dict[str, float]:
    recorder = Recorder()
    strategy = FSDP2RLStrategy(dp_replicate_size=2)
    toy_trainer(root, callbacks=[recorder], strategy=strategy, devices=4).fit(
        toy_module(model, max_rl_steps=2), toy_data()
    )
    metrics: dict[str, float] = recorder.steps[-1]["metrics"]
    return metrics


def test_hybrid_sharding_gives_the_numbers_of_one_process(tmp_path: Path, tiny_directory: Path) -> None:
    recorder = Recorder()
    toy_trainer(tmp_path, callbacks=[recorder]).fit(toy_module(tiny_directory, max_rl_steps=2), toy_data())
    plain = recorder.steps[-1]["metrics"]
    for metrics in run_distributed(_hybrid, 4, tmp_path, tiny_directory, init_process_group=False, timeout=120.0):
        for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
            assert metrics[name] == pytest.approx(plain[name], abs=1e-5), name
