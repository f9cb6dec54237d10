"""The sharded value model against one process: same data, same numbers, also where a rank holds no row."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.experience import make_experience
from support.fork import run_distributed
from support.tiny import tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_rlhf.algorithms.value_losses import value_loss
from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.engines.value_head import FSDP2ValueEngine, TorchValueEngine
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CPU = torch.device("cpu")
LENGTHS = [5, 30, 8, 17, 3, 40, 12, 9]
ROWS = {"uneven": [[0, 1, 2, 3, 4, 5], [6, 7]], "one-empty": [[], [5, 0, 7, 6, 1, 2, 4, 3]]}
STEPS = 3
TOLERANCE = 1e-5

Outcome = tuple[list[tuple[float, float]], dict[str, Tensor], Tensor]
"""Loss and gradient norm of each step, the parameters and the rows' values at the end."""


def _config(**kwargs: Any) -> EngineConfig:
    adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
    return EngineConfig(role="critic", model=tiny_model(), optimizer=adamw, max_grad_norm=0.5, **kwargs)


def _data() -> Experience:
    return make_experience(LENGTHS)


def _regression(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    assert outputs.values is not None
    old = torch.zeros_like(outputs.values)
    return value_loss(outputs.values, old, micro_batch.advantages, micro_batch.loss_mask, clip=0.2)


def _train(engine: BaseEngine, data: Experience) -> Outcome:
    seen = []
    for _ in range(STEPS):
        metrics = engine.train_batch(data, _regression)
        seen.append((metrics["loss"], metrics["grad_norm"]))
    values = engine.infer_batch(data).values
    assert values is not None
    return seen, {name: value.clone() for name, value in engine.get_per_tensor_param()}, values


def _one_process() -> Outcome:
    engine = TorchValueEngine(_config(), device=CPU)
    engine.initialize()
    return _train(engine, _data())


def _sharded(**kwargs: Any) -> FSDP2ValueEngine:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    engine = FSDP2ValueEngine(_config(**kwargs), device=CPU, mesh=mesh)
    engine.initialize()
    return engine


def _on_ranks(rows: list[list[int]], kwargs: dict[str, Any]) -> Outcome:
    return _train(_sharded(**kwargs), _data().select(rows[dist.get_rank()]))


@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 2}, {"max_tokens_per_micro_batch": 48}], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_two_ranks_equal_one_process(rows: list[list[int]], cut: dict[str, int]) -> None:
    losses, parameters, values = _one_process()
    assert float(parameters["score.weight"].abs().max()) > 1e-3
    data = _data()
    for rank, (found_losses, found_parameters, found_values) in enumerate(run_distributed(_on_ranks, 2, rows, cut)):
        for mine, theirs in zip(found_losses, losses, strict=True):
            assert mine == pytest.approx(theirs, abs=TOLERANCE)
        assert found_parameters.keys() == parameters.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(found_parameters[name], value, atol=TOLERANCE, rtol=0)
        own = torch.cat([values[:0], *(values[data.sequence_ids == row] for row in rows[rank])])
        torch.testing.assert_close(found_values, own, atol=TOLERANCE, rtol=0)


def test_two_ranks_saved_and_one_process_goes_on(tmp_path: Path) -> None:
    def save() -> Outcome:
        engine = _sharded()
        data = _data().select(ROWS["uneven"][dist.get_rank()])
        _train(engine, data)
        engine.save_checkpoint(tmp_path / "critic")
        return _train(engine, data)

    expected = run_distributed(save, 2)[0]
    engine = TorchValueEngine(_config(), device=CPU)
    engine.initialize()
    engine.load_checkpoint(tmp_path / "critic")
    losses, parameters, _ = _train(engine, _data())
    for mine, theirs in zip(losses, expected[0], strict=True):
        assert mine == pytest.approx(theirs, abs=TOLERANCE)
    for name, value in expected[1].items():
        torch.testing.assert_close(parameters[name], value, atol=TOLERANCE, rtol=0)
