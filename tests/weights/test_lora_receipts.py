"""Pushes of an actor with an adapter: merged tensors, a base that never drifts, a receipt that sees a stale engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from support.tiny import tiny_model, write_tiny_model
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.contracts.lora import LoRAConfig
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.rollout.hf import HFReferenceEngine
from lightning_rlhf.weights import CheckpointEngineManager, NaiveCheckpointEngine

PROBE = [5, 9, 3, 20, 11, 40]


def adapted(*, dtype: torch.dtype = torch.float32) -> TorchEngine:
    config = EngineConfig(
        model=tiny_model().to(dtype),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        lora=LoRAConfig(rank=2, alpha=4.0),
        compute_dtype=dtype,
    )
    engine = TorchEngine(config, device=torch.device("cpu"))
    engine.initialize()
    return engine


def move_adapter(engine: TorchEngine, *, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if "lora_" in name:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


class Stale(HFReferenceEngine):
    """Says that it holds what came, as an engine does whose layers in use are packed copies, and goes on as before."""

    is_stale = False

    @override
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if not self.is_stale:
            super().load_weights(named_tensors)
            return
        self.claimed = {name: tensor.clone() for name, tensor in named_tensors}

    @override
    def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        if not self.is_stale:
            return super().read_weights(names)
        return {name: self.claimed[name] for name in names}


def manager_of(engine: TorchEngine, rollout: HFReferenceEngine) -> CheckpointEngineManager:
    return CheckpointEngineManager(
        engine=engine,
        checkpoint_engine=NaiveCheckpointEngine(),
        rollout=rollout,
        probe_token_ids=PROBE,
        probe_tolerance=1e-2,
    )


def test_merged_weights_arrive_and_unchanged_is_told_from_changed(tmp_path: Path) -> None:
    engine, rollout = adapted(), HFReferenceEngine(write_tiny_model(tmp_path), max_model_len=64)
    manager = manager_of(engine, rollout)
    assert manager.update_weights(0).probe_difference < 1e-5
    assert manager.update_weights(1).unchanged
    move_adapter(engine, scale=0.2, seed=0)
    receipt = manager.update_weights(2)
    assert not receipt.unchanged
    assert receipt.probe_difference < 1e-5


@pytest.mark.parametrize(("scale", "message"), [(5e-4, "moved by up to .* by nothing at all"), (1.0, "differ by")])
def test_the_trainer_changed_and_the_engine_did_not(tmp_path: Path, scale: float, message: str) -> None:
    """Also if it moved by less than the tolerance of the probe, as one step of an adapter does."""
    engine, rollout = adapted(), Stale(write_tiny_model(tmp_path), max_model_len=64)
    manager = manager_of(engine, rollout)
    move_adapter(engine, scale=0.05, seed=0)
    manager.update_weights(0)
    rollout.is_stale = True
    assert manager.update_weights(1).unchanged, "neither side changed: no error"
    move_adapter(engine, scale=scale, seed=1)
    with pytest.raises(RuntimeError, match=message):
        manager.update_weights(2)
    assert rollout.weight_version is None


def test_d01_the_base_is_the_same_to_the_bit_after_many_pushes_of_other_adapters() -> None:
    engine = adapted(dtype=torch.bfloat16)
    base = {name: p.detach().clone() for name, p in engine.module.named_parameters() if "lora_" not in name}
    seen = set()
    for push in range(100):
        move_adapter(engine, scale=0.05, seed=push)
        merged = dict(engine.get_per_tensor_param())
        seen.add(float(merged["model.layers.0.self_attn.q_proj.weight"].float().sum()))
    assert len(seen) > 50, "the adapter hardly moves: this test shows nothing"
    for name, parameter in engine.module.named_parameters():
        assert "lora_" in name or torch.equal(parameter, base[name]), name
