"""The sharded engine on a tiny model and a batch of uneven lengths, and one process to compare it with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.engines.fsdp2 import FSDP2Engine
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.types import Experience
from support.experience import make_experience, policy_gradient
from support.tiny import tiny_model

CPU = torch.device("cpu")
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
LENGTHS = [5, 30, 8, 17, 3, 40, 12, 9]
STEPS = 3
TOLERANCE = 1e-5
UNEVEN = [[0, 1, 2, 3, 4, 5], [6, 7]]

Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]
"""Loss and gradient norm of each step, and the parameters at the end."""


def engine_config(*, tied: bool = False, seed: int = 0, **kwargs: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": tiny_model(tied=tied, seed=seed), "optimizer": ADAMW, "max_grad_norm": 0.5, **kwargs}
    )


def sharded_engine(config: EngineConfig, *shape: int, **kwargs: Any) -> FSDP2Engine:
    sizes = shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard")[-len(sizes) :])
    engine = FSDP2Engine(config, device=CPU, mesh=mesh, **kwargs)
    engine.initialize()
    return engine


def train(engine: BaseEngine, data: Experience, steps: int = STEPS) -> Outcome:
    seen = []
    for _ in range(steps):
        metrics = engine.train_batch(data, policy_gradient)
        seen.append((metrics["loss"], metrics["grad_norm"]))
    return seen, {name: value.clone() for name, value in engine.get_per_tensor_param()}


def one_process(**kwargs: Any) -> Outcome:
    engine = TorchEngine(engine_config(**kwargs), device=CPU)
    engine.initialize()
    return train(engine, make_experience(LENGTHS))


def on_ranks(rows: list[list[int]], shape: tuple[int, ...], kwargs: dict[str, Any]) -> Outcome:
    engine = sharded_engine(engine_config(**kwargs), *shape)
    assert engine.data_parallel_size == dist.get_world_size()
    assert engine.data_parallel_rank == dist.get_rank()
    return train(engine, make_experience(LENGTHS).select(rows[dist.get_rank()]))


def difference(found: Outcome, expected: Outcome) -> float:
    assert found[1].keys() == expected[1].keys()
    numbers = [
        abs(a - b)
        for mine, theirs in zip(found[0], expected[0], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    parameters = [float((found[1][name] - value).abs().max()) for name, value in expected[1].items()]
    return max(*numbers, *parameters)
