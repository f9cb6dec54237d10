"""The collectives that docs/engines.md says each back end costs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.experience import make_experience, policy_gradient
from support.fork import run_distributed
from support.tiny import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineRegistry

CPU = torch.device("cpu")
LAYERS = 3
MICRO_BATCHES = 4
AXES = ("dp_replicate", "dp_shard", "sp")
OPERATORS = {
    "c10d._allgather_base_": "all_gather",
    "_c10d_functional.all_gather_into_tensor": "all_gather",  # DTensor's
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.alltoall_base_": "all_to_all",
    "c10d.allreduce_": "all_reduce",
}


class _Traffic(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        if name in OPERATORS:
            self.counts[OPERATORS[name]] += 1
        return func(*args, **(kwargs or {}))


def _engine(backend: str, shape: tuple[int, ...], **kwargs: Any) -> BaseEngine:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[: len(shape)])
    config = EngineConfig(model=tiny_model(layers=LAYERS), optimizer=torch.optim.AdamW, micro_batch_size=2, **kwargs)
    engine = EngineRegistry.new("language_model", backend, config, device=CPU, mesh=mesh)
    engine.initialize()
    return engine


def _count(backend: str, shape: tuple[int, ...], kwargs: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    engine = _engine(backend, shape, **kwargs)
    data = make_experience([5, 9, 7, 6, 8, 12, 4, 10])
    with _Traffic() as inference:
        engine.infer_batch(data)
    with _Traffic() as training:
        engine.forward_backward_batch(data, policy_gradient)
    return dict(inference.counts), dict(training.counts)


UNITS = LAYERS + 1
"""What is sharded: each layer, and the rest at the root."""


@pytest.mark.parametrize(("shape", "replicas"), [((1, 2), 1), ((2, 2), 2)], ids=["fsdp2", "hybrid"])
def test_fsdp2_gathers_twice_a_micro_batch_and_reduces_once_a_mini_batch(shape: tuple[int, int], replicas: int) -> None:
    agreement = {"all_reduce": 1}
    over_replicas = UNITS if replicas > 1 else 0
    for inference, training in run_distributed(_count, math.prod(shape), "fsdp2", shape, {}):
        assert inference == {"all_gather": UNITS * MICRO_BATCHES, **agreement}
        assert training == {
            "all_gather": 2 * UNITS * MICRO_BATCHES,
            "reduce_scatter": UNITS,
            "all_reduce": 1 + over_replicas,
        }


@pytest.mark.parametrize("recompute", [False, True])
def test_ulysses_exchanges_four_times_a_layer_and_pass(recompute: bool) -> None:
    passes = 3 if recompute else 2
    kwargs = {"gradient_checkpointing": recompute}
    for inference, training in run_distributed(_count, 2, "ulysses", (1, 1, 2), kwargs):
        assert inference == {
            "all_to_all": 4 * LAYERS * MICRO_BATCHES,
            "all_gather": (UNITS + 1) * MICRO_BATCHES,
            "all_reduce": 1,
        }
        assert training == {
            "all_to_all": passes * 4 * LAYERS * MICRO_BATCHES,
            "all_gather": (2 * UNITS + 1) * MICRO_BATCHES,
            "reduce_scatter": UNITS,
            "all_reduce": 1,
        }


def test_replicas_reduce_each_parameter_once() -> None:
    def run() -> dict[str, int]:
        config = EngineConfig(model=tiny_model(layers=LAYERS), optimizer=torch.optim.AdamW, micro_batch_size=2)
        group = dist.group.WORLD
        engine = EngineRegistry.new("language_model", "torch", config, device=CPU, process_group=group)
        engine.initialize()
        with _Traffic() as training:
            engine.forward_backward_batch(make_experience([5, 9, 7, 6]), policy_gradient)
        return dict(training.counts)

    parameters = len(list(tiny_model(layers=LAYERS).parameters()))
    assert run_distributed(run, 2) == [{"all_reduce": parameters + 1}] * 2


def test_export_gathers_each_parameter_once() -> None:
    def run() -> dict[str, int]:
        engine = _engine("fsdp2", (1, 2))
        with _Traffic() as export:
            for _ in engine.get_per_tensor_param():
                pass
        return dict(export.counts)

    parameters = len(list(tiny_model(layers=LAYERS).parameters()))
    assert run_distributed(run, 2) == [{"all_gather": parameters}] * 2
