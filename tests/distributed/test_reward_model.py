"""A reward model sharded with FSDP2 gives each rank's rows the rewards of one process, however many a rank has."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.experience import make_experience
from support.fork import run_distributed
from support.tiny import tiny_model, tiny_tokenizer
from torch.distributed.device_mesh import init_device_mesh

from lightning_rlhf.algorithms.value_losses import value_loss
from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.engines.value_head import FSDP2ValueEngine, TorchValueEngine
from lightning_rlhf.rewards import ModelReward
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CPU = torch.device("cpu")
TEXTS = [("1 + 1 =", "2"), ("2 + 2 =", "five"), ("3 + 3 =", ""), ("4 + 4 =", "0123456789"), ("5", "6")]
SHARES = [[0, 1, 2, 3, 4], []]


def _config() -> EngineConfig:
    adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
    return EngineConfig(role="reward_model", model=tiny_model(), optimizer=adamw, micro_batch_size=2)


def _loss(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    assert outputs.values is not None
    return value_loss(outputs.values, torch.zeros_like(outputs.values), micro_batch.advantages, micro_batch.loss_mask)


def _rewards(engine: BaseEngine, rows: list[int], trained_on: list[int]) -> list[float | None]:
    engine.initialize()
    for _ in range(3):  # the head starts at zero
        engine.train_batch(make_experience([5, 30, 8]).select(trained_on), _loss)
    reward = ModelReward(engine, tiny_tokenizer())
    return reward([TEXTS[row][0] for row in rows], [TEXTS[row][1] for row in rows], [{} for _ in rows])


def _sharded() -> list[float | None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    return _rewards(
        FSDP2ValueEngine(_config(), device=CPU, mesh=mesh), SHARES[dist.get_rank()], [[0, 1, 2], []][dist.get_rank()]
    )


def test_two_ranks_reward_as_one_process_does() -> None:
    expected = _rewards(TorchValueEngine(_config(), device=CPU), [row for share in SHARES for row in share], [0, 1, 2])
    found = [value for rank in run_distributed(_sharded, 2, timeout=100.0) for value in rank]
    assert expected == pytest.approx(found, abs=1e-5)
    assert max(value for value in expected if value) - min(value for value in expected if value) > 0.02
