"""Micro-batches and padding are logged on every strategy, each RL step, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fork import run_distributed
from support.megatron_imports import megatron_is_imported  # noqa: F401
from support.toy import Recorder, toy_data, toy_module, toy_ppo, toy_trainer

from lightning_rlhf.strategies import FSDP2RLStrategy, MegatronRLStrategy, UlyssesRLStrategy

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp2_rl": FSDP2RLStrategy,
    "ulysses_rl": lambda: UlyssesRLStrategy(sp_size=2),
    "megatron_rl": lambda: MegatronRLStrategy(context_parallel_size=2),
}
PADS = ("ulysses_rl", "megatron_rl")


def _fit(root: Path, make: Callable[..., Any], model: Path, strategy: Any, devices: int, **changes: Any) -> Any:
    recorder = Recorder()
    trainer = toy_trainer(root, callbacks=[recorder], strategy=strategy, devices=devices)
    trainer.fit(make(model, max_rl_steps=2, **changes), toy_data())
    return [step["metrics"] for step in recorder.steps]


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_two_ranks_log_the_same(tmp_path: Path, tiny_directory: Path, strategy: str) -> None:
    """16 rollouts a step, three at a time: on 8 of them three micro-batches, on all of them six."""

    def fit() -> Any:
        return _fit(tmp_path, toy_module, tiny_directory, STRATEGIES[strategy](), 2, micro_batch_size=3)

    ranks = run_distributed(fit, 2, init_process_group=False, timeout=120.0)
    assert len(ranks[0]) == 2
    for one, other in zip(*ranks, strict=True):
        assert one["actor/num_micro_batches"] == (6.0 if strategy in PADS else 3.0)
        assert one["actor/padding_fraction"] == other["actor/padding_fraction"]
        if strategy in PADS:  # by less than a token for each rank and micro-batch, or by less than 4 for each sequence
            most = 6 if strategy == "ulysses_rl" else 16 * 3
            assert 0.0 < one["actor/padding_fraction"] <= most / one["rollout/num_tokens"]
        else:
            assert one["actor/padding_fraction"] == 0.0


def test_the_critic_has_its_own(tmp_path: Path, tiny_directory: Path) -> None:
    """Two optimizer steps of 8 rollouts for the actor in micro-batches of 8, one of 16 for the critic in two."""
    changes = {"mini_batch_size": 8, "critic_mini_batch_size": 16, "micro_batch_size": 8}
    for metrics in _fit(tmp_path, toy_ppo, tiny_directory, "auto", 1, **changes):
        assert metrics["actor/num_micro_batches"] == 1.0
        assert metrics["critic/num_micro_batches"] == 2.0
        assert metrics["actor/padding_fraction"] == metrics["critic/padding_fraction"] == 0.0
