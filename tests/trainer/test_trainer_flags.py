"""Every row of docs/trainer_flags.md: a flag or callback works, or is refused before a model loads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as plc
from lightning.pytorch.loggers import CSVLogger
from support.tiny import write_tiny_model
from support.toy import Recorder, digit_reward, toy_data, toy_module

from lightning_rlhf.callbacks import HFRollout, RLCheckpoint, WeightSync
from lightning_rlhf.data import ListPrompts
from lightning_rlhf.strategies import FSDP2RLStrategy

DOC = Path(__file__).parents[2] / "docs" / "trainer_flags.md"


@dataclass
class Run:
    """What a case may look at afterwards."""

    trainer: pl.Trainer
    module: Any
    recorder: Recorder
    root: Path


@dataclass
class Case:
    """Flags (and callbacks) of one row; what holds afterwards, or what the refusal says."""

    flags: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] = list
    holds: Callable[[Run], bool] | None = None
    refused: str | None = None
    module: dict[str, Any] = field(default_factory=dict)


def _steps(number: int) -> Callable[[Run], bool]:
    return lambda run: run.module.rl_step == number == len(run.recorder.steps)


def _validated(times: int) -> Callable[[Run], bool]:
    return lambda run: run.module.validations == times and "val/reward" in run.trainer.callback_metrics


def _names(pattern: str) -> Callable[[Run], bool]:
    return lambda run: any(run.root.rglob(pattern))


class _NaNOnce(plc.Callback):
    """Makes the actor's loss NaN, so that anomaly detection has something to find."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def broken(outputs: Any, micro_batch: Any) -> Any:
            from lightning_rlhf.types import LossOutput

            zero = outputs.log_probs * 0
            return LossOutput(terms=torch.sqrt(zero - zero.detach()) * 0, metrics={})

        pl_module.policy_loss = broken


OPEN = {"module": {"max_rl_steps": None}}
WORKS: dict[str, Case] = {
    "max_epochs": Case({"max_epochs": 1}, holds=_steps(3), **OPEN),
    "max_steps": Case({"max_steps": 3}, holds=_steps(2), module={"max_rl_steps": None, "mini_batch_size": 4}),
    "min_epochs": Case({"min_epochs": 2, "max_epochs": 2}, holds=_steps(2)),
    "max_time": Case({"max_time": {"seconds": 1}}, holds=lambda run: run.module.rl_step >= 1, **OPEN),
    "limit_train_batches": Case({"limit_train_batches": 2, "max_epochs": 1}, holds=_steps(2), **OPEN),
    "limit_val_batches": Case({"limit_val_batches": 0}, holds=lambda run: run.module.validations == 0),
    "val_check_interval": Case(
        {"val_check_interval": 1, "check_val_every_n_epoch": None, "limit_val_batches": 1}, holds=_validated(2)
    ),
    "check_val_every_n_epoch": Case({"check_val_every_n_epoch": 2, "max_epochs": 2}, holds=_validated(1), **OPEN),
    "num_sanity_val_steps": Case({"num_sanity_val_steps": 1, "max_epochs": 1}, holds=_validated(2), **OPEN),
    "fast_dev_run": Case({"fast_dev_run": True}, holds=_steps(1), **OPEN),
    "precision=32-true": Case({"precision": "32-true"}, holds=_steps(2)),
    "precision=bf16-mixed": Case(
        {"precision": "bf16-mixed"},
        holds=lambda run: (
            run.module.actor.config.compute_dtype is torch.bfloat16
            and next(run.module.actor.module.parameters()).dtype is torch.float32
        ),
    ),
    "deterministic": Case({"deterministic": True}, holds=_steps(2)),
    "benchmark": Case({"benchmark": True}, holds=_steps(2)),
    "inference_mode": Case({"inference_mode": False, "limit_val_batches": 1, "max_epochs": 1}, holds=_steps(2)),
    "profiler": Case({"profiler": "simple"}, holds=lambda run: "run_training_batch" in run.trainer.profiler.summary()),
    "barebones": Case(
        {
            "barebones": True,
            "enable_progress_bar": None,
            "enable_model_summary": None,
            "enable_checkpointing": None,
            "logger": None,
            "num_sanity_val_steps": None,
        },
        holds=_steps(2),
    ),
    "use_distributed_sampler": Case({"use_distributed_sampler": False}, holds=_steps(2)),
    "log_every_n_steps": Case({"log_every_n_steps": 50, "logger": CSVLogger}, holds=_names("metrics.csv")),
    "enable_model_summary": Case({"enable_model_summary": True}, holds=_steps(2)),
    "EarlyStopping": Case(
        {"max_epochs": 5},
        lambda: [plc.EarlyStopping("reward/mean", mode="max", stopping_threshold=0.0, check_on_train_epoch_end=True)],
        holds=_steps(3),
        **OPEN,
    ),
    "LearningRateMonitor": Case(
        {"logger": CSVLogger, "log_every_n_steps": 1},
        lambda: [plc.LearningRateMonitor("step")],
        holds=lambda run: "lr-EngineOptimizer" in next(run.root.rglob("metrics.csv")).read_text(),
    ),
    "ModelCheckpoint": Case(
        {"enable_checkpointing": True, "max_epochs": 1},
        lambda: [plc.ModelCheckpoint(monitor="reward/mean", mode="max", save_top_k=1)],
        holds=_names("*.ckpt"),
        **OPEN,
    ),
    "RLCheckpoint": Case(
        {"enable_checkpointing": True}, lambda: [RLCheckpoint(every_n_rl_steps=1)], holds=_names("rl_step=*.ckpt")
    ),
    "RichProgressBar": Case({"enable_progress_bar": True}, lambda: [plc.RichProgressBar()], holds=_steps(2)),
    "TQDMProgressBar": Case({"enable_progress_bar": True}, lambda: [plc.TQDMProgressBar()], holds=_steps(2)),
    "Timer": Case({}, lambda: [plc.Timer("00:01:00:00")], holds=_steps(2)),
    "LambdaCallback": Case({}, lambda: [plc.LambdaCallback(on_train_batch_end=lambda *_: None)], holds=_steps(2)),
}

REFUSED: dict[str, Case] = {
    "gradient_clip_val": Case(
        {"gradient_clip_val": 0.5}, refused=r"gradient_clip_val=0\.5\).*Say GRPO\(max_grad_norm=0\.5\) instead"
    ),
    "accumulate_grad_batches": Case(
        {"accumulate_grad_batches": 4}, refused=r"accumulate_grad_batches=4\) has nothing to accum.*micro_batch_size"
    ),
    "overfit_batches": Case({"overfit_batches": 1}, refused="overfit_batches replaces the sampler.*ListPrompts"),
    "reload_dataloaders_every_n_epochs": Case(
        {"reload_dataloaders_every_n_epochs": 1}, refused="would start the prompts anew. Leave it at 0"
    ),
    "precision=16-true": Case({"precision": "16-true"}, refused="'16-true'.*choose '32-true' or 'bf16-mixed'"),
    "precision=bf16-true": Case({"precision": "bf16-true"}, refused="'bf16-true'.*choose '32-true' or 'bf16-mixed'"),
    "precision=64-true": Case({"precision": "64-true"}, refused="'64-true'.*choose '32-true' or 'bf16-mixed'"),
    "sync_batchnorm": Case(
        {"sync_batchnorm": True, "strategy": FSDP2RLStrategy}, refused=r"sync_batchnorm=True\) means nothing"
    ),
    "StochasticWeightAveraging": Case(
        {}, lambda: [plc.StochasticWeightAveraging(1e-3)], refused="StochasticWeightAveraging does not work.*reference_"
    ),
    "WeightAveraging": Case({}, lambda: [plc.WeightAveraging()], refused="WeightAveraging does not work with RL"),
    "GradientAccumulationScheduler": Case(
        {},
        lambda: [plc.GradientAccumulationScheduler({0: 2})],
        refused="GradientAccumulationScheduler does not work.*micro_batch_size",
    ),
    "BatchSizeFinder": Case({}, lambda: [plc.BatchSizeFinder()], refused="BatchSizeFinder does not work.*plan"),
    "LearningRateFinder": Case({}, lambda: [plc.LearningRateFinder()], refused="LearningRateFinder does not work.*lr"),
    "ModelPruning": Case({}, lambda: [plc.ModelPruning("l1_unstructured")], refused="ModelPruning does not work"),
    "BackboneFinetuning": Case({}, lambda: [plc.BackboneFinetuning()], refused="BackboneFinetuning does not work"),
}  # fmt: skip


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model: one layer."""
    return write_tiny_model(tmp_path_factory.mktemp("micro"), layers=1)


def _trainer(root: Path, case: Case, recorder: Recorder) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "max_epochs": -1,
        "enable_model_summary": False, "enable_checkpointing": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    flags = {**quiet, **case.flags}
    if flags["logger"] is CSVLogger:
        flags["logger"] = CSVLogger(root)
    if flags.get("strategy") is FSDP2RLStrategy:
        flags["strategy"] = FSDP2RLStrategy()
    given = [HFRollout(num_rollouts=2, max_new_tokens=3, max_model_len=64), WeightSync(), recorder, *case.callbacks()]
    return pl.Trainer(default_root_dir=root, callbacks=given, **flags)


def _module(model: Any, case: Case) -> Any:
    module = toy_module(model, **{"reward": digit_reward, "max_rl_steps": 2, **case.module})
    module.validations, evaluate = 0, module._evaluate

    def counted(batch: Any, stage: str) -> None:
        module.validations += 1
        evaluate(batch, stage)

    module._evaluate = counted
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WORKS)
def test_it_works(name: str, tmp_path: Path, micro: Path) -> None:
    case, recorder = WORKS[name], Recorder()
    try:
        trainer, module = _trainer(tmp_path, case, recorder), _module(micro, case)
        trainer.fit(module, toy_data(val_source=ListPrompts(["7 + 7 ="])))
    finally:
        torch.use_deterministic_algorithms(False)
    assert case.holds is not None
    assert case.holds(Run(trainer, module, recorder, tmp_path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_a_model_loads(name: str, tmp_path: Path, micro: Path) -> None:
    case = REFUSED[name]
    module = _module(micro, case)
    with pytest.raises(ValueError, match=case.refused):
        _trainer(tmp_path, case, Recorder()).fit(module, toy_data())
    assert "actor" not in module._engines


def test_detect_anomaly_names_the_function(tmp_path: Path, micro: Path) -> None:
    case = Case({"detect_anomaly": True}, lambda: [_NaNOnce()])
    with (
        pytest.raises(RuntimeError, match="returned nan values"),
        pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
    ):
        _trainer(tmp_path, case, Recorder()).fit(_module(micro, case), toy_data())


@pytest.mark.filterwarnings("ignore")
def test_validate_test_and_predict(tmp_path: Path, micro: Path) -> None:
    module = _module(micro, Case())
    trainer = _trainer(tmp_path, Case(), Recorder())
    data = toy_data(val_source=ListPrompts(["7 + 7 =", "8 + 8 ="]))
    [validated] = trainer.validate(module, data, verbose=False)
    [tested] = trainer.test(module, data, verbose=False)
    assert validated["val/reward"] == tested["test/reward"]
    with pytest.raises(ValueError, match=r"Trainer\.predict does nothing with GRPO.*lightning-rlhf evaluate"):
        trainer.predict(module, data)
    with pytest.raises(ValueError, match=r"Trainer\.test needs prompts: give PromptDataModule\(val_source="):
        trainer.test(module, toy_data(), verbose=False)


def test_the_table_has_a_row_for_each_case() -> None:
    rows = {}
    for line in DOC.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) >= 2:
            for name in re.findall(r"`([^`]+)`", cells[0]):
                rows[name] = cells[1]
    for cases, verdict in ((WORKS, "works"), (REFUSED, "refused")):
        for name in cases:
            assert rows.pop(name).startswith(verdict), name
    for name, verdict in {
        "detect_anomaly": "works",
        "validate": "works",
        "test": "works",
        "predict": "refused",
    }.items():
        assert rows.pop(name).startswith(verdict), name
    assert rows == {}, "rows without a test"
