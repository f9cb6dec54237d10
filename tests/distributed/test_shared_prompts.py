"""Shared prompts on sharded engines against one process that computes every prompt, and where they are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.experience import policy_gradient
from support.fork import run_distributed
from support.groups import make_groups, make_prompt
from support.tiny import tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineRegistry
from lightning_rlhf.strategies import FSDP2RLStrategy, UlyssesRLStrategy
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CPU = torch.device("cpu")
TOLERANCE = 1e-5
STEPS = 2
ROWS = {"a group cut in two": [[0, 1, 2, 5, 6], [3, 4, 7]], "one-empty": [[], [7, 2, 0, 1, 6, 3, 5, 4]]}


def _data() -> Experience:
    return make_groups([(make_prompt(20, 1), [3, 17, 1, 9, 30]), (make_prompt(12, 3), [6, 5, 40])])


def _regression(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    assert outputs.values is not None
    return LossOutput(terms=(outputs.values - micro_batch.advantages - 1.0) ** 2)


def _engine(model_type: str, backend: str, *, share: bool, **settings: Any) -> BaseEngine:
    layout: dict[str, Any] = {}
    if backend == "fsdp2":
        layout["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    if backend == "ulysses":
        sizes = (1, 1, dist.get_world_size())
        layout["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard", "sp"))
    optimizer = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
    config = EngineConfig(model=tiny_model(tied=True), optimizer=optimizer, share_prompts=share, **settings)
    engine = EngineRegistry.new(model_type, backend, config, device=CPU, **layout)
    engine.initialize()
    return engine


def _train(engine: BaseEngine, data: Experience) -> dict[str, Tensor]:
    """Parameters after two steps, and the outputs of the rows then; the losses and norms on the way."""
    found: dict[str, Tensor] = {}
    is_language_model = not any(name.endswith("score.weight") for name, _ in engine.module.named_parameters())
    for step in range(STEPS):
        metrics = engine.train_batch(data, policy_gradient if is_language_model else _regression)
        found |= {f"{name} {step}": torch.tensor(metrics[name]) for name in ("loss", "grad_norm")}
    found |= {name: value.clone() for name, value in engine.get_per_tensor_param()}
    outputs = engine.infer_batch(data)
    scores = outputs.log_probs if is_language_model else outputs.values
    assert scores is not None
    return {**found, "scores": scores}


@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 2}, {"max_tokens_per_micro_batch": 70}], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_two_ranks_equal_one_process_that_computes_every_prompt(
    model_type: str, rows: list[list[int]], cut: dict[str, int]
) -> None:
    def run() -> dict[str, Tensor]:
        engine = _engine(model_type, "fsdp2", share=True, **cut)
        return _train(engine, _data().select(rows[dist.get_rank()]))

    data = _data()
    expected = _train(_engine(model_type, "torch", share=False), data)
    for rank, found in enumerate(run_distributed(run, 2)):
        scores = torch.cat([data.advantages[:0], *(expected["scores"][data.sequence_ids == row] for row in rows[rank])])
        assert found.keys() == expected.keys()
        for name, value in found.items():
            wanted = scores if name == "scores" else expected[name]
            torch.testing.assert_close(value, wanted, rtol=0, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


def test_sequence_parallel_ranks_refuse_before_anything_is_loaded() -> None:
    def refused() -> str:
        with pytest.raises(ValueError) as info:
            _engine("language_model", "ulysses", share=True)
        return str(info.value)

    with pytest.raises(ValueError, match="share_prompts=True does not work with sequence parallelism") as info:
        UlyssesRLStrategy(sp_size=2, share_prompts=True)
    assert run_distributed(refused, 2) == [str(info.value)] * 2


def test_one_sequence_parallel_rank_shares() -> None:
    expected = _train(_engine("language_model", "torch", share=False), _data())
    (found,) = run_distributed(lambda: _train(_engine("language_model", "ulysses", share=True), _data()), 1)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=TOLERANCE)


def test_a_strategy_hands_it_to_its_engines() -> None:
    assert FSDP2RLStrategy(share_prompts=True).share_prompts
    assert UlyssesRLStrategy(share_prompts=True).share_prompts
    assert not FSDP2RLStrategy().share_prompts
