"""LoRA on sharded engines: what one process does, and adapters that survive another number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.experience import make_experience, policy_gradient
from support.fork import run_distributed
from support.tiny import tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineRegistry
from lightning_rlhf.contracts.lora import LoRAConfig
from lightning_rlhf.engines.torch import TorchEngine

CPU = torch.device("cpu")
LENGTHS = [5, 30, 8, 17, 3]
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
AXES = {"fsdp2": ("dp_shard",), "ulysses": ("dp_replicate", "dp_shard", "sp")}
TOLERANCE = 1e-5

Outcome = tuple[list[float], Tensor, dict[str, Tensor]]


def _config(**changes: Any) -> EngineConfig:
    lora = LoRAConfig(rank=4, alpha=8.0)
    settings = {"model": tiny_model(hidden=128), "optimizer": ADAMW, "lora": lora, "micro_batch_size": 2}
    return EngineConfig(**{**settings, **changes})


def _alone(config: EngineConfig) -> BaseEngine:
    engine = TorchEngine(config, device=CPU)
    engine.initialize()
    return engine


def _sharded(backend: str, *shape: int, **changes: Any) -> BaseEngine:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[backend])
    engine = EngineRegistry.new("language_model", backend, _config(**changes), device=CPU, mesh=mesh)
    engine.initialize()
    return engine


def _train(engine: BaseEngine, steps: int) -> Outcome:
    """Losses and norms, log-probs of the base, and the merged parameters."""
    rows = range(engine.data_parallel_rank, len(LENGTHS), engine.data_parallel_size)
    data, numbers = make_experience(LENGTHS).select(rows), []
    with engine.disable_adapter():
        engine.infer_batch(data)  # the reference is scored before the first update
    for _ in range(steps):
        metrics = engine.train_batch(data, policy_gradient)
        numbers += [metrics["loss"], metrics["grad_norm"]]
    with engine.disable_adapter():
        base = engine.infer_batch(make_experience(LENGTHS)).log_probs
    assert base is not None
    return numbers, base, {name: value.clone() for name, value in engine.get_per_tensor_param()}


def _assert_same(found: Outcome, expected: Outcome) -> None:
    assert found[0] == pytest.approx(expected[0], abs=TOLERANCE)
    torch.testing.assert_close(found[1], expected[1], atol=TOLERANCE, rtol=0)
    assert found[2].keys() == expected[2].keys()
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("backend", "shape", "changes"),
    [("fsdp2", (2,), {"gradient_checkpointing": True}), ("ulysses", (1, 1, 2), {})],
)
def test_a_sharded_adapter_trains_as_in_one_process(
    backend: str, shape: tuple[int, ...], changes: dict[str, Any]
) -> None:
    expected = _train(_alone(_config()), 3)
    start = dict(tiny_model(hidden=128).named_parameters())
    assert any(not torch.equal(value, start[name]) for name, value in expected[2].items())
    for found in run_distributed(lambda: _train(_sharded(backend, *shape, **changes), 3), 2):
        _assert_same(found, expected)


def test_adapters_go_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    def save() -> Outcome:
        engine = _sharded("fsdp2", 2)
        _train(engine, 2)
        engine.save_checkpoint(tmp_path / "step")
        return _train(engine, 1)

    def go_on() -> Outcome:
        engine = _sharded("fsdp2", dist.get_world_size(), lora=LoRAConfig(rank=4, alpha=8.0, seed=5))
        engine.load_checkpoint(tmp_path / "step")
        return _train(engine, 1)

    expected = run_distributed(save, 2)[0]
    for world in (1, 3):
        for found in run_distributed(go_on, world):
            _assert_same(found, expected)
