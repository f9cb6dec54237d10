"""GAE and whitening on flat experience, against plain loops and the padded functions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from support.experience import make_experience
from support.fork import run_distributed
from support.tiny import tiny_model
from torch import Tensor

from lightning_rlhf.algorithms.advantages import whiten
from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.modules.token_advantages import token_advantages, value_metrics, whiten_over_ranks
from lightning_rlhf.types import Experience

LENGTHS = [7, 3, 12, 2, 5]


def _engine() -> TorchEngine:
    group = dist.group.WORLD if dist.is_initialized() else None
    return TorchEngine(EngineConfig(model=tiny_model()), device=torch.device("cpu"), process_group=group)


def _data(lengths: list[int] = LENGTHS) -> tuple[Experience, Tensor, Tensor]:
    """Unequal lengths, an observation inside a response, a row that does not train, and one without a response."""
    data = make_experience(lengths)
    mask = data.response_mask.clone()
    if len(lengths) > 2:
        mask[int(data.cu_seqlens[2]) + 5] = False
        mask &= data.sequence_ids != 1
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(data.num_tokens, generator=draw)
    rewards = torch.randn(len(lengths), generator=draw)
    if len(lengths) > 2:
        rewards[1] = torch.nan
    return dataclasses.replace(data, loss_mask=mask), rewards, values


def _by_loop(
    data: Experience, rewards: Tensor, values: Tensor, penalties: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    advantages, returns = torch.zeros(data.num_tokens), torch.zeros(data.num_tokens)
    for row in range(len(data)):
        places = [t for t in range(int(data.cu_seqlens[row]), int(data.cu_seqlens[row + 1])) if data.loss_mask[t]]
        following, next_value = 0.0, 0.0
        for number, t in enumerate(reversed(places)):
            reward = (float(rewards[row]) if number == 0 else 0.0) - float(penalties[t])
            following = reward + gamma * next_value - float(values[t]) + gamma * lam * following
            next_value = float(values[t])
            advantages[t], returns[t] = following, following + next_value
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0)])
def test_flat_gae_is_the_loop(gamma: float, lam: float) -> None:
    data, rewards, values = _data()
    penalties = torch.linspace(0, 1, data.num_tokens)
    expected = _by_loop(data, rewards, values, penalties, gamma, lam)
    found = token_advantages(data, rewards, values, gamma=gamma, lam=lam, penalties=penalties)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        assert not mine[~data.loss_mask].any()


def test_a05_numbers_of_gae_survive_the_flat_layout() -> None:
    data = make_experience([4, 2], prompt_length=2)  # the second row has no response
    values = torch.tensor([9.0, 9.0, 0.2, 0.4, 9.0, 9.0])
    advantages, returns = token_advantages(data, torch.tensor([1.0, 5.0]), values, gamma=1.0, lam=0.95)
    assert advantages.tolist() == pytest.approx([0, 0, 0.77, 0.6, 0, 0])
    assert returns.tolist() == pytest.approx([0, 0, 0.97, 1.0, 0, 0])


def test_no_rows_give_no_advantages() -> None:
    data, rewards, values = _data([])
    advantages, returns = token_advantages(data, rewards, values, gamma=1.0, lam=0.95)
    assert advantages.shape == returns.shape == (0,)


def test_whitening_in_one_process_is_that_of_the_algorithms() -> None:
    data, _, values = _data()
    values[~data.loss_mask] = torch.nan
    torch.testing.assert_close(
        whiten_over_ranks(values, data.loss_mask, _engine()), whiten(values, data.loss_mask), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("mask", [[False] * 3, [True, False, False], [True, True, True]], ids=["none", "one", "equal"])
def test_whitening_without_spread_is_zero(mask: list[bool]) -> None:
    whitened = whiten_over_ranks(torch.full((3,), 0.3), torch.tensor(mask), _engine())
    assert whitened.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rows", [[[0, 1, 2], [3, 4]], [[], [4, 3, 2, 1, 0]]], ids=["uneven", "one-empty"])
def test_whitening_and_metrics_are_those_of_all_ranks_tokens(rows: list[list[int]]) -> None:
    data, _, values = _data()
    returns = values + torch.linspace(0, 1, data.num_tokens)
    mask = data.loss_mask
    expected = whiten(values, mask)
    error, target = (returns - values)[mask].double(), returns[mask].double()
    explained = 1 - float(error.var(correction=0) / target.var(correction=0))

    def on_rank() -> tuple[Tensor, dict[str, float]]:
        # per-token numbers travel with their rows in fields of the experience
        every = dataclasses.replace(data, values=values, returns=returns)
        mine = every.select(rows[dist.get_rank()])
        assert mine.values is not None
        assert mine.returns is not None
        engine = _engine()
        metrics = value_metrics(mine, mine.values, mine.returns, engine)
        return whiten_over_ranks(mine.values, mine.loss_mask, engine), metrics

    for rank, (whitened, metrics) in enumerate(run_distributed(on_rank, 2)):
        own = torch.cat([expected[:0], *(expected[data.sequence_ids == row] for row in rows[rank])])
        torch.testing.assert_close(whitened, own, atol=1e-6, rtol=1e-6)
        assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-6)
        assert metrics["critic/return_mean"] == pytest.approx(float(target.mean()), rel=1e-6)


def test_a_perfect_critic_explains_everything_and_a_constant_target_says_nothing() -> None:
    data, _, values = _data()
    assert value_metrics(data, values, values, _engine())["critic/explained_variance"] == 1.0
    constant = torch.ones_like(values)
    assert set(value_metrics(data, values, constant, _engine())) == {"critic/return_mean"}
    nothing = dataclasses.replace(data, loss_mask=torch.zeros_like(data.loss_mask))
    assert value_metrics(nothing, values, values, _engine()) == {}
