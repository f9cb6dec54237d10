"""Where libraries disagree: the numbers of each, by one switch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_rlhf.algorithms.aggregation import loss_weights
from lightning_rlhf.modules import GRPO, PPO

OLD = torch.tensor([[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.2, -0.3, -3.0]])
NEW = torch.tensor([[-0.8, -0.6, -1.2, -0.1], [-0.9, -0.4, -0.3, -1.0]])
ADVANTAGES = torch.tensor([[1.0] * 4, [-0.5] * 4])
MASK = torch.tensor([[True, True, True, False], [True] * 4])


def _module(kind: Any = GRPO, **arguments: Any) -> Any:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return kind(model="nothing-is-loaded", reward=lambda p, r, m: [0.0] * len(p), optimizer=optimizer, **arguments)


def _loss(module: Any) -> float:
    terms = module.objective(NEW, OLD, ADVANTAGES, MASK, cu_seqlens=None).terms
    return float((terms * loss_weights(MASK, "token-mean")).sum())


@pytest.mark.parametrize(
    ("kind", "compat", "arguments", "expected"),
    [
        (GRPO, None, {}, 0.344547),
        (GRPO, "trl", {}, 0.344547),
        (GRPO, "verl", {}, 0.031043),
        (PPO, "verl", {}, 0.031043),
        (PPO, None, {}, 0.344547),
        (GRPO, "verl", {"dual_clip": 100.0}, 0.344547),
        (GRPO, "verl", {"clip_high": 0.28}, 0.016557),
        (GRPO, "verl", {"policy_loss": "dapo"}, 0.016557),
        (GRPO, None, {"policy_loss": "dapo"}, 0.330061),
        (GRPO, None, {"policy_loss": "cispo"}, 0.226353),
        (GRPO, "verl", {"policy_loss": "cispo"}, 0.226353),
        (GRPO, "trl", {"policy_loss": "cispo"}, 0.103877),
        (GRPO, "trl", {"policy_loss": "cispo", "clip_low": 0.2, "clip_high": 0.2}, 0.226353),
        (GRPO, "verl", {"policy_loss": "gspo"}, _loss(_module(policy_loss="gspo"))),
    ],
)
def test_the_clip_of_each_library(kind: Any, compat: str | None, arguments: dict[str, Any], expected: float) -> None:
    assert _loss(_module(kind, compat=compat, **arguments)) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("compat", "arguments", "expected"),
    [
        (None, {}, 0.866024),
        ("verl", {}, 0.866024),
        ("trl", {}, 0.865875),
        ("trl", {"advantage_args": {"eps": 1e-6}}, 0.866024),
        ("trl", {"advantage": "rloo"}, 0.666667),
    ],
)
def test_the_epsilon_of_each_library(compat: str | None, arguments: dict[str, Any], expected: float) -> None:
    rewards, lengths = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64), torch.ones(4)
    found = _module(compat=compat, **arguments).estimate_advantages(rewards, ["a"] * 4, lengths)
    assert found.tolist() == pytest.approx([expected, -expected, -expected, expected], abs=1e-6)
