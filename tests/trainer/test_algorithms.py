"""Every estimator, loss and correction through the real Trainer, chosen by name; splits and order change nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.toy import Recorder, digit_reward, parameters_of, toy_data, toy_module, toy_trainer
from torch import Tensor

from lightning_rlhf.algorithms import losses, registry
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.types import Rollouts

COMPARED = ("actor/loss", "actor/grad_norm", "actor/ratio_max", "actor/clip_fraction_high", "reward/mean")
OFF_POLICY: dict[str, Any] = {"max_rl_steps": 2, "mini_batch_size": 8, "num_epochs": 2}
GSPO: dict[str, Any] = {
    "policy_loss": "gspo",
    "clip_low": 3e-4,
    "clip_high": 4e-4,
    "aggregation": "seq-mean-token-mean",
    **OFF_POLICY,
}
RLOO: dict[str, Any] = {
    "advantage": "rloo",
    "policy_loss": "reinforce",
    "policy_loss_args": {"ratio_cap": 2.0},
    "aggregation": "seq-mean-token-sum",
    "rollout_correction": "sequence_tis",
    **OFF_POLICY,
}


def _fit(root: Path, model: Any, *, strategy: str = "auto", devices: int = 1, **module: Any) -> dict[str, Any]:
    recorder = Recorder()
    trainer = toy_trainer(root, callbacks=[recorder], strategy=strategy, devices=devices)
    grpo = toy_module(model, **{"max_rl_steps": 2, **module})
    trainer.fit(grpo, toy_data())
    return {
        "metrics": [step["metrics"] for step in recorder.steps],
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
        "versions": grpo.policy_version,
    }


def _assert_same(one: dict[str, Any], other: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    for a, b in zip(one["metrics"], other["metrics"], strict=True):
        assert a.keys() == b.keys()
        for name in COMPARED:
            assert a[name] == pytest.approx(b[name], abs=tolerance, rel=tolerance), name
    for name, value in one["parameters"].items():
        assert torch.allclose(torch.tensor(value), torch.tensor(other["parameters"][name]), atol=tolerance), name


def _assert_trained(result: dict[str, Any], *, versions: int) -> None:
    assert len(result["metrics"]) == 2
    assert result["versions"] == versions
    for metrics in result["metrics"]:
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["actor/grad_norm"] > 0.0


@pytest.mark.parametrize("name", sorted(registry._POLICY_LOSSES))
def test_each_policy_loss_trains_off_policy(tmp_path: Path, tiny_directory: Path, name: str) -> None:
    _assert_trained(_fit(tmp_path, tiny_directory, policy_loss=name, **OFF_POLICY), versions=8)


@pytest.mark.parametrize("name", sorted(registry._ADVANTAGES))
def test_each_estimator_trains(tmp_path: Path, tiny_directory: Path, name: str) -> None:
    _assert_trained(_fit(tmp_path, tiny_directory, advantage=name), versions=2)


@pytest.mark.parametrize("name", sorted(registry._CORRECTIONS))
def test_corrections_of_a_faithful_rollout_change_next_to_nothing(
    tmp_path: Path, tiny_directory: Path, name: str
) -> None:
    """Here the tokens were sampled by the very model that trains: ratios are 1 but for rounding."""
    plain = _fit(tmp_path, tiny_directory, max_rl_steps=1)
    corrected = _fit(tmp_path, tiny_directory, max_rl_steps=1, rollout_correction=name)
    metrics = corrected["metrics"][0]
    assert metrics["actor/correction_kept_fraction"] == 1.0
    assert metrics["actor/correction_weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["actor/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["actor/mismatch_chi_square"] == pytest.approx(0.0, abs=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(plain["metrics"][0]["actor/grad_norm"], rel=1e-3)


def test_a_correction_that_keeps_nothing_trains_nothing(tmp_path: Path, tiny_directory: Path) -> None:
    result = _fit(tmp_path, tiny_directory, rollout_correction="icepop", correction_args={"low": 1.5, "high": 2.0})
    assert result["metrics"][0]["actor/grad_norm"] == 0.0
    assert result["metrics"][0]["actor/correction_kept_fraction"] == 0.0
    assert result["metrics"][0]["actor/effective_sample_size"] == 0.0


def test_bypass_takes_the_rollouts_log_probs_as_old(tmp_path: Path, tiny_directory: Path) -> None:
    trainer = _fit(tmp_path, tiny_directory, **OFF_POLICY)
    bypass = _fit(tmp_path, tiny_directory, old_log_probs_from="rollout", **OFF_POLICY)
    # the reference rollout engine's log-probs are the trainer's: only the forward is saved
    _assert_same(trainer, bypass, tolerance=1e-4)
    assert bypass["metrics"][0]["actor/mismatch_abs_max"] > trainer["metrics"][0]["actor/mismatch_abs_max"]


@pytest.mark.parametrize("settings", [GSPO, RLOO], ids=["gspo", "rloo"])
def test_two_fsdp2_ranks_give_the_numbers_of_one_process(
    tmp_path: Path, tiny_directory: Path, settings: dict[str, Any]
) -> None:
    plain = _fit(tmp_path, tiny_directory, **settings)
    _assert_trained(plain, versions=8)
    ranks = run_distributed(
        _fit, 2, tmp_path, tiny_directory, strategy="fsdp2_rl", devices=2, init_process_group=False, timeout=120.0,
        **settings,
    )  # fmt: skip
    for result in ranks:
        _assert_same(plain, result)


@pytest.mark.parametrize("limit", [{"micro_batch_size": 1}, {"max_tokens_per_micro_batch": 60}])
@pytest.mark.parametrize("settings", [GSPO, RLOO], ids=["gspo", "rloo"])
def test_micro_batches_change_nothing(
    tmp_path: Path, tiny_directory: Path, settings: dict[str, Any], limit: dict[str, int]
) -> None:
    _assert_same(_fit(tmp_path, tiny_directory, **settings), _fit(tmp_path, tiny_directory, **settings, **limit))


@pytest.mark.parametrize("settings", [GSPO, RLOO], ids=["gspo", "rloo"])
def test_the_order_in_which_rows_were_sampled_changes_nothing(
    tmp_path: Path, tiny_directory: Path, settings: dict[str, Any]
) -> None:
    def fit(*, shuffled: bool) -> dict[str, Any]:
        recorder, grpo = Recorder(), toy_module(tiny_directory, **settings)
        make = grpo.make_experience

        def made(rollouts: Rollouts, rewards: Tensor) -> Any:
            order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(grpo.rl_step)).tolist()
            return make(rollouts.select(order), rewards[order]) if shuffled else make(rollouts, rewards)

        grpo.make_experience = made  # type: ignore[method-assign]
        toy_trainer(tmp_path, callbacks=[recorder]).fit(grpo, toy_data())
        parameters = {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()}
        return {"metrics": [step["metrics"] for step in recorder.steps], "parameters": parameters}

    _assert_same(fit(shuffled=False), fit(shuffled=True))


@pytest.mark.parametrize("name", sorted(registry._ADVANTAGES))
def test_the_order_of_rows_and_groups_changes_no_advantage(tiny_directory: Path, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 3, (24,), generator=generator).float()
    lengths = torch.randint(1, 9, (24,), generator=generator)
    uids = [f"prompt {row % 6}" for row in range(24)]
    module = toy_module(tiny_directory, advantage=name)
    known = {"baselines": rewards.roll(1), "components": torch.stack([rewards, lengths.float()], dim=1)}
    expected = module.estimate_advantages(rewards, uids, lengths, **known)
    for _ in range(3):
        order = torch.randperm(24, generator=generator)
        shuffled = module.estimate_advantages(
            rewards[order],
            [uids[row] for row in order.tolist()],
            lengths[order],
            **{name: values[order] for name, values in known.items()},
        )
        assert torch.allclose(shuffled, expected[order], atol=1e-6)


def test_the_overlong_penalty_is_part_of_the_reward(tmp_path: Path, tiny_directory: Path) -> None:
    """Each response of eight tokens, the limit, loses 1; the mean over all ranks' rows is reported."""
    arguments: dict[str, Any] = {"max_rl_steps": 1, "reward": lambda p, r, m: [0.0] * len(r)}
    plain = _fit(tmp_path, tiny_directory, **arguments)["metrics"][0]
    metrics = _fit(tmp_path, tiny_directory, **arguments, overlong_max_tokens=8, overlong_cache_tokens=1)["metrics"][0]
    assert 0.0 < plain["rollout/truncated_fraction"] < 1.0
    assert plain["reward/mean"] == 0.0
    assert "reward/overlong_penalty" not in plain
    assert metrics["reward/mean"] == metrics["reward/overlong_penalty"] == -plain["rollout/truncated_fraction"]
    assert metrics["actor/grad_norm"] > 0.0 == plain["actor/grad_norm"]


def test_parts_of_ones_own_train(tmp_path: Path, tiny_directory: Path) -> None:
    def last_is_best(rewards: Tensor, uids: list[str], *, lengths: Tensor) -> Tensor:
        assert len(uids) == len(rewards) == len(lengths)
        return torch.arange(len(rewards)).float() / len(rewards)

    def half(*inputs: Tensor, cu_seqlens: Tensor, factor: float) -> Any:
        output = losses.ppo_clip(*inputs, cu_seqlens=cu_seqlens)
        return type(output)(terms=factor * output.terms, metrics=output.metrics)

    ours = {"advantage": last_is_best, "policy_loss": half, "reward": digit_reward}
    whole = _fit(tmp_path, tiny_directory, **{**ours, "policy_loss": "ppo_clip"}, max_rl_steps=1)
    result = _fit(tmp_path, tiny_directory, **ours, policy_loss_args={"factor": 0.5}, max_rl_steps=1)
    assert result["metrics"][0]["actor/grad_norm"] == pytest.approx(
        whole["metrics"][0]["actor/grad_norm"] / 2, rel=1e-5
    )


def test_a_mini_batch_without_a_reward_is_no_zero_in_the_mean_of_the_others(
    tmp_path: Path, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen mini-batches of one row, of which four train: the logged loss and norm are the means of four."""
    steps: list[dict[str, float]] = []
    train = BaseEngine.train_batch

    def recorded(engine: BaseEngine, *inputs: Any) -> dict[str, float]:
        steps.append(train(engine, *inputs))
        return steps[-1]

    monkeypatch.setattr(BaseEngine, "train_batch", recorded)

    def some(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float | None]:
        return [float(row) if row < 4 else None for row in range(len(prompts))]

    with pytest.warns(UserWarning, match=r"12 mini-batch\(es\) had no row"):
        metrics = _fit(tmp_path, tiny_directory, reward=some, mini_batch_size=1, max_rl_steps=1)["metrics"][0]
    assert len(steps) == 4
    for name in ("loss", "grad_norm"):
        assert metrics[f"actor/{name}"] == pytest.approx(sum(step[name] for step in steps) / 4, rel=1e-9)
    assert metrics["actor/skipped_steps"] == 12.0


def test_a04_a_step_in_which_nothing_trains_has_a_loss_of_zero_and_says_so(
    tmp_path: Path, tiny_directory: Path
) -> None:
    with pytest.warns(UserWarning, match="had no row with a reward"):
        metrics = _fit(tmp_path, tiny_directory, reward=lambda p, r, m: [None] * len(p), max_rl_steps=1)["metrics"][0]
    assert metrics["actor/loss"] == metrics["actor/grad_norm"] == 0.0
    assert metrics["rollout/trained_tokens"] == 0.0
    assert metrics["reward/failed"] == 16.0
