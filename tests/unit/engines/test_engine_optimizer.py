"""EngineOptimizer, alone and under Lightning."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from support.experience import make_experience, policy_gradient
from support.tiny import tiny_model
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_rlhf.contracts.engine import EngineConfig, OptimizerStepResult
from lightning_rlhf.engines.optimizer import EngineOptimizer
from lightning_rlhf.engines.torch import TorchEngine


def _halve(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def _engine(**kwargs: Any) -> TorchEngine:
    config = EngineConfig(
        **{"model": tiny_model(), "optimizer": partial(torch.optim.AdamW, lr=1e-3), "lr_schedule": _halve, **kwargs}
    )
    engine = TorchEngine(config, device=torch.device("cpu"))
    engine.initialize()
    return engine


def test_it_shares_groups_and_state_with_the_engine() -> None:
    engine = _engine()
    optimizer = EngineOptimizer(engine)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups is engine.optimizer.param_groups
    assert optimizer.state is engine.optimizer.state
    optimizer.param_groups[0]["lr"] = 0.25
    assert engine.train_batch(make_experience([5, 6]), policy_gradient)["lr"] == 0.25
    # torch's load_state_dict makes new lists: the sharing outlives it
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    assert optimizer.param_groups is engine.optimizer.param_groups
    assert "EngineOptimizer" in repr(optimizer)


def test_a_step_runs_closure_then_engine_then_hook() -> None:
    engine = _engine()
    events: list[Any] = []
    optimizer = EngineOptimizer(engine, after_step=lambda result: events.append(result))
    engine.forward_backward_batch(make_experience([5, 6]), policy_gradient)
    before = dict(engine.get_per_tensor_param())["lm_head.weight"].clone()

    def closure() -> str:
        assert torch.equal(dict(engine.get_per_tensor_param())["lm_head.weight"], before)
        events.append("closure")
        return "from the closure"

    assert optimizer.step(closure) == "from the closure"
    assert events[0] == "closure"
    assert isinstance(events[1], OptimizerStepResult)
    assert events[1] is engine.last_step is optimizer.last_result
    assert events[1].stepped
    assert optimizer.param_groups[0]["lr"] == 5e-4
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in engine.module.parameters())


def test_state_dict_holds_moments_and_schedule() -> None:
    data = make_experience([5, 6, 20])
    first, second = _engine(), _engine()
    for _ in range(2):
        first.train_batch(data, policy_gradient)
    saved = copy.deepcopy(EngineOptimizer(first).state_dict())
    assert set(saved) == {"state", "param_groups", "lr_scheduler"}
    second.module.load_state_dict(first.module.state_dict())
    EngineOptimizer(second).load_state_dict(saved)
    for engine in (first, second):
        assert engine.train_batch(data, policy_gradient)["lr"] == 2.5e-4
    for (_, mine), (_, theirs) in zip(first.get_per_tensor_param(), second.get_per_tensor_param(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="no lr_scheduler"):
        EngineOptimizer(second).load_state_dict({**saved, "lr_scheduler": None})


def test_an_engine_without_optimizer_is_refused() -> None:
    with pytest.raises(RuntimeError, match="actor engine has no optimizer"):
        EngineOptimizer(_engine(optimizer=None))


class _Module(pl.LightningModule):
    """Two optimizer steps a batch, through Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.engine = _engine()
        self.model = self.engine.module
        self.events: list[str] = []

    def configure_optimizers(self) -> EngineOptimizer:
        return EngineOptimizer(self.engine, after_step=lambda result: self.events.append(f"after {result.stepped}"))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.events.append(f"before {type(optimizer).__name__}")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        assert isinstance(optimizer, Optimizer)
        assert optimizer.param_groups is self.engine.optimizer.param_groups
        self.engine.bind_optimizer(optimizer)
        for _ in range(2):
            self.engine.train_batch(make_experience([5, 6]), policy_gradient)


def test_lightning_counts_its_steps_and_saves_its_state(tmp_path: Path) -> None:
    module = _Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.arange(2), batch_size=1))
    assert trainer.global_step == 4
    assert module.events == ["before EngineOptimizer", "after True"] * 4
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"][0]
    assert saved["lr_scheduler"]["last_epoch"] == 4
    assert float(saved["state"][0]["step"]) == 4.0
