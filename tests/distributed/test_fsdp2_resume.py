"""A sharded engine's state goes on where it was, also on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from support.experience import make_experience
from support.fork import run_distributed
from support.sharded import CPU, LENGTHS, TOLERANCE, UNEVEN, Outcome, difference, engine_config, sharded_engine, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.engines import checkpoint
from lightning_rlhf.engines.torch import TorchEngine


def _continue(path: Path, build: Callable[[EngineConfig], BaseEngine]) -> Outcome:
    engine = build(engine_config(seed=7))  # other weights, which the checkpoint replaces
    engine.load_checkpoint(path)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    return train(engine, make_experience(LENGTHS).select(range(rank, len(LENGTHS), world)), steps=1)


def test_f07_an_engine_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    def save() -> Outcome:
        engine = sharded_engine(engine_config())
        data = make_experience(LENGTHS).select(UNEVEN[dist.get_rank()])
        train(engine, data, steps=2)
        engine.save_checkpoint(tmp_path / "step")
        return train(engine, data, steps=1)

    expected = run_distributed(save, 2)[0]

    def build(config: EngineConfig) -> TorchEngine:
        engine = TorchEngine(config, device=CPU)
        engine.initialize()
        return engine

    assert difference(_continue(tmp_path / "step", build), expected) < TOLERANCE
    for world in (1, 2, 3):
        for found in run_distributed(_continue, world, tmp_path / "step", sharded_engine):
            assert difference(found, expected) < TOLERANCE
    # and bit for bit on the same layout
    again = run_distributed(_resume_unevenly, 2, tmp_path / "step")
    assert difference(again[0], expected) == 0.0


def _resume_unevenly(path: Path) -> Outcome:
    engine = sharded_engine(engine_config(seed=7))
    engine.load_checkpoint(path)
    return train(engine, make_experience(LENGTHS).select(UNEVEN[dist.get_rank()]), steps=1)


def _weight(value: float) -> tuple[nn.Linear, torch.optim.Adam]:
    layer = nn.Linear(5, 2, bias=False)
    nn.init.constant_(layer.weight, value)
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return layer, torch.optim.Adam(layer.parameters(), lr=0.1)


def _adam_step(layer: nn.Linear, optimizer: torch.optim.Adam, gradient: float) -> None:
    layer.weight.grad = torch.full_like(layer.weight, gradient)
    optimizer.step()


def test_f07_adam_moments_survive_another_number_of_ranks(tmp_path: Path) -> None:
    def save() -> None:
        layer, optimizer = _weight(1.0)
        for _ in range(3):
            _adam_step(layer, optimizer, 1.0)
        checkpoint.save(tmp_path / "step", checkpoint.state_of(layer, optimizer, None), group=dist.group.WORLD)

    def load() -> tuple[Tensor, Tensor]:
        layer, optimizer = _weight(9.0)
        checkpoint.load(tmp_path / "step", layer, optimizer, None, group=dist.group.WORLD)
        loaded = layer.weight.detach().full_tensor().clone()
        _adam_step(layer, optimizer, -1.0)
        return loaded, layer.weight.detach().full_tensor()

    run_distributed(save, 2)
    for world in (1, 2, 3):
        for loaded, stepped in run_distributed(load, world):
            torch.testing.assert_close(loaded, torch.full((2, 5), 0.7), atol=1e-5, rtol=0)
            torch.testing.assert_close(stepped, torch.full((2, 5), 0.65816), atol=1e-5, rtol=0)
