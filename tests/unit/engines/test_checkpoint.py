"""Checkpoints of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.experience import make_experience, policy_gradient
from support.tiny import tiny_model
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.torch import TorchEngine

DATA = make_experience([5, 30, 8, 17])


def _warm_up(optimizer: Optimizer) -> SequentialLR:
    return SequentialLR(
        optimizer,
        [LinearLR(optimizer, start_factor=0.1, total_iters=2), CosineAnnealingLR(optimizer, T_max=10)],
        milestones=[2],
    )


def _engine(*, seed: int = 0, **kwargs: Any) -> TorchEngine:
    config = {
        "model": tiny_model(seed=seed, tied=True),
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
        "lr_schedule": _warm_up,
    }
    engine = TorchEngine(EngineConfig(**{**config, **kwargs}), device=torch.device("cpu"))
    engine.initialize()
    return engine


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.AdamW, lr=1e-3),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.SGD, lr=1.0),
    ],
    ids=["adamw", "momentum", "sgd"],
)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_resumed_engine_goes_on_bit_for_bit(tmp_path: Path, optimizer: Any, steps_before: int) -> None:
    unbroken = _engine(optimizer=optimizer)
    for _ in range(steps_before):
        unbroken.train_batch(DATA, policy_gradient)
    unbroken.save_checkpoint(tmp_path / "step")
    resumed = _engine(optimizer=optimizer, seed=1)
    resumed.load_checkpoint(tmp_path / "step")
    for _ in range(2):
        assert resumed.train_batch(DATA, policy_gradient) == unbroken.train_batch(DATA, policy_gradient)
    for (name, mine), (_, theirs) in zip(resumed.get_per_tensor_param(), unbroken.get_per_tensor_param(), strict=True):
        assert torch.equal(mine, theirs), name


def test_saving_changes_nothing_in_the_engine(tmp_path: Path) -> None:
    saved, other = _engine(), _engine()
    saved.save_checkpoint(tmp_path / "fresh")
    assert saved.optimizer is not None
    assert not saved.optimizer.state
    for step in range(2):
        assert saved.train_batch(DATA, policy_gradient) == other.train_batch(DATA, policy_gradient)
        saved.save_checkpoint(tmp_path / f"step-{step}")
    with pytest.raises(FileExistsError, match="step-1 holds a checkpoint already"):
        saved.save_checkpoint(tmp_path / "step-1")


def test_an_engine_without_optimizer_reads_the_parameters(tmp_path: Path) -> None:
    trained = _engine()
    trained.train_batch(DATA, policy_gradient)
    trained.save_checkpoint(tmp_path / "step")
    frozen = _engine(optimizer=None, lr_schedule=None, seed=1)
    frozen.load_checkpoint(tmp_path / "step")
    assert torch.equal(frozen.infer_batch(DATA).log_probs, trained.infer_batch(DATA).log_probs)


def test_a_checkpoint_that_lacks_something_is_refused(tmp_path: Path) -> None:
    _engine(optimizer=None, lr_schedule=None).save_checkpoint(tmp_path / "frozen")
    with pytest.raises(ValueError, match=r"no optimizer, this optimizer has 1 group"):
        _engine().load_checkpoint(tmp_path / "frozen")
    _engine(lr_schedule=None).save_checkpoint(tmp_path / "constant")
    with pytest.raises(ValueError, match="no learning-rate schedule"):
        _engine().load_checkpoint(tmp_path / "constant")


class _Callable:
    def __call__(self, step: int) -> float:
        return 1.0

    def __reduce__(self) -> Any:
        return (print, ("code from a checkpoint",))


def test_a_schedule_that_would_need_a_pickle_is_refused_when_saving(tmp_path: Path) -> None:
    engine = _engine(lr_schedule=lambda optimizer: LambdaLR(optimizer, _Callable()))
    assert engine.lr_scheduler is not None
    engine.lr_scheduler.note = _Callable()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="cannot be loaded without running"):
        engine.save_checkpoint(tmp_path / "step")
    assert not (tmp_path / "step").exists()
