"""What needs more than a micro-batch or a reward: covariance losses, ReMax, GDPO, the KL in the reward, references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.toy import Recorder, digit_reward, parameters_of, toy_data, toy_module, toy_trainer

from lightning_rlhf.algorithms.advantages import gdpo, grpo, remax
from lightning_rlhf.algorithms.covariance_losses import select_largest_covariance
from lightning_rlhf.algorithms.length_penalties import relative
from lightning_rlhf.callbacks import HFRollout, RLCheckpoint
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.modules.step_data import StepData
from lightning_rlhf.rewards import WeightedRewards
from lightning_rlhf.types import Experience

KL_COV: dict[str, Any] = {
    "policy_loss": "kl_cov",
    "policy_loss_args": {"fraction": 0.1, "coefficient": 2.0},
    "mini_batch_size": 8,
    "num_epochs": 2,
}
CLIP_COV: dict[str, Any] = {
    "policy_loss": "clip_cov",
    "policy_loss_args": {"fraction": 0.2, "covariance_range": [0.01, 5.0]},
    "mini_batch_size": 8,
    "num_epochs": 2,
}


def length_reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Short responses are better."""
    return [-float(len(response)) for response in responses]


TWO_REWARDS = WeightedRewards([(digit_reward, 2.0), (length_reward, 0.5)])


class Advantages(Recorder):
    """Also keeps the step's data, to be counted again by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.data: list[StepData] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.data.append(pl_module.step_data)


def _fit(
    root: Path,
    model: Path,
    *,
    strategy: str = "auto",
    devices: int = 1,
    recorder: Recorder | None = None,
    save: bool = False,
    ckpt_path: str | None = None,
    **module: Any,
) -> dict[str, Any]:
    recorder = recorder or Recorder()
    callbacks: list[Any] = [recorder, *([RLCheckpoint(every_n_rl_steps=1, save_top_k=-1)] if save else [])]
    rollout = HFRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64)
    trainer = toy_trainer(root, callbacks=callbacks, rollout=rollout, strategy=strategy, devices=devices)
    grpo = toy_module(model, **{"max_rl_steps": 2, **module})
    trainer.fit(grpo, toy_data(), ckpt_path=ckpt_path)
    moved = grpo.reference.module.named_parameters() if grpo.uses_reference and devices == 1 else ()
    return {
        "metrics": [step["metrics"] for step in recorder.steps],
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
        "reference": {name.split("model.", 1)[-1]: p.detach().clone().numpy() for name, p in moved},
        "coefs": (grpo.kl_coef, grpo.entropy_coef),
    }


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for a, b in zip(one["metrics"], other["metrics"], strict=True):
        for name in ("actor/loss", "actor/grad_norm", "reward/mean", "actor/selected_fraction", "reward/kl_penalty"):
            assert (name in a) == (name in b)
            if name in a:
                assert a[name] == pytest.approx(b[name], abs=1e-5, rel=1e-5), name
    for name, value in one["parameters"].items():
        assert torch.allclose(torch.tensor(value), torch.tensor(other["parameters"][name]), atol=1e-5), name


SETTINGS: dict[str, dict[str, Any]] = {
    "kl_cov": KL_COV,
    "clip_cov": CLIP_COV,
    "remax": {"advantage": "remax"},
    "gdpo": {"advantage": "gdpo", "reward": TWO_REWARDS},
    "kl in reward": {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1", "reference_every": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_and_micro_batches_change_nothing(tmp_path: Path, tiny_directory: Path, name: str) -> None:
    settings = SETTINGS[name]
    alone = _fit(tmp_path, tiny_directory, **settings)
    assert all(metrics["actor/grad_norm"] > 0 for metrics in alone["metrics"])
    _same(alone, _fit(tmp_path, tiny_directory, micro_batch_size=3, **settings))
    ranks = run_distributed(
        _fit, 2, tmp_path, tiny_directory, strategy="fsdp2_rl", devices=2, init_process_group=False, timeout=120.0,
        **settings,
    )  # fmt: skip
    for rank in ranks:
        _same(alone, rank)


def test_the_tokens_of_largest_covariance_are_those_of_the_whole_mini_batch(
    tmp_path: Path, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the log-probs of the policy as it is before each optimizer step, over all eight rows."""
    seen: list[int] = []
    train = BaseEngine.train_batch

    def checked(engine: BaseEngine, data: Experience, loss: Any) -> dict[str, float]:
        now = engine.infer_batch(data).log_probs
        assert now is not None
        assert data.selected is not None
        expected = select_largest_covariance(now, data.advantages, data.loss_mask, fraction=0.1)
        assert torch.equal(data.selected, expected)
        seen.append(int(expected.sum()))
        return train(engine, data, loss)

    monkeypatch.setattr(BaseEngine, "train_batch", checked)
    _fit(tmp_path, tiny_directory, micro_batch_size=2, **{**KL_COV, "max_rl_steps": 1})
    assert len(seen) == 4
    assert min(seen) >= 2


def test_remax_takes_off_the_reward_of_the_greedy_rollout(tmp_path: Path, tiny_directory: Path) -> None:
    asked: list[int] = []

    def counted(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        asked.append(len(responses))
        return digit_reward(prompts, responses, metadata)

    recorder = Advantages()
    metrics = _fit(tmp_path, tiny_directory, recorder=recorder, advantage="remax", reward=counted)["metrics"]
    assert sorted(asked) == [4, 4, 16, 16]  # a greedy rollout for each of four prompts, beside four sampled ones
    for data in recorder.data:
        by_prompt = {fact.uid: fact.baseline for fact in data.plan.facts}
        assert len(by_prompt) == 4
        assert None not in by_prompt.values()
        assert all(fact.baseline == by_prompt[fact.uid] for fact in data.plan.facts)
        expected = data.own_rows(remax(data.rewards, data.uids, baselines=data.baselines))
        experience = data.experience
        assert torch.equal(experience.advantages, expected[experience.sequence_ids] * experience.loss_mask)
    # the greedy rollouts are no part of the step's own metrics
    assert metrics[0]["reward/failed"] == 0.0


def test_gdpo_normalises_each_reward_apart(tmp_path: Path, tiny_directory: Path) -> None:
    recorder = Advantages()
    _fit(tmp_path, tiny_directory, recorder=recorder, advantage="gdpo", reward=TWO_REWARDS)
    for data in recorder.data:
        assert data.components.shape == (16, 2)
        assert torch.allclose(2.0 * data.components[:, 0] + 0.5 * data.components[:, 1], data.rewards, atol=1e-6)
        expected = data.own_rows(gdpo(data.components, data.uids, weights=[2.0, 0.5]))
        experience = data.experience
        assert torch.allclose(experience.advantages, expected[experience.sequence_ids] * experience.loss_mask)


def test_the_kl_in_the_reward_is_summed_over_each_response(tmp_path: Path, tiny_directory: Path) -> None:
    """By k1, against a reference that stays; the first step's policy is the reference, so its penalty is 0."""
    recorder = Advantages()
    settings: dict[str, Any] = {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1", "normalize_std": False}
    metrics = _fit(tmp_path, tiny_directory, recorder=recorder, **settings)["metrics"]
    assert metrics[0]["reward/kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[1]["reward/kl_penalty"] != 0.0
    data = recorder.data[1]
    experience = data.experience
    assert experience.old_log_probs is not None
    assert experience.ref_log_probs is not None
    difference = (experience.old_log_probs - experience.ref_log_probs) * experience.loss_mask
    rewards = torch.zeros(16)
    for row, (start, end) in enumerate(zip(experience.cu_seqlens, experience.cu_seqlens[1:], strict=False)):
        rewards[row] = data.own_rows(data.rewards)[row] - 0.5 * difference[start:end].sum()
    for uid in set(experience.uids):
        rows = [row for row, other in enumerate(experience.uids) if other == uid]
        for row in rows:
            of_row = experience.advantages[experience.sequence_ids == row][-1]
            assert float(of_row) == pytest.approx(float(rewards[row] - rewards[rows].mean()), abs=1e-5)


def test_a_length_penalty_is_added_before_advantages_are_estimated(tmp_path: Path, tiny_directory: Path) -> None:
    recorder = Advantages()
    arguments: dict[str, Any] = {"length_penalty": "relative", "length_penalty_args": {"weight": 0.5}}
    metrics = _fit(tmp_path, tiny_directory, recorder=recorder, **arguments)["metrics"]
    for data, step in zip(recorder.data, metrics, strict=True):
        added = relative(data.rewards, data.uids, data.response_lengths, weight=0.5)
        assert step["reward/length_penalty"] == pytest.approx(float(added.mean()))
        assert step["reward/mean"] == pytest.approx(float(data.rewards.mean()))
        expected = data.own_rows(grpo(data.rewards + added, data.uids))
        experience = data.experience
        assert torch.equal(experience.advantages, expected[experience.sequence_ids] * experience.loss_mask)
    assert any(step["reward/length_penalty"] != 0 for step in metrics)


def _reference_after(folder: Path, model: Path, steps: int, **settings: Any) -> dict[str, Any]:
    return _fit(folder, model, max_rl_steps=steps, kl_coef=0.1, **settings)


def test_the_reference_follows_the_actor(tmp_path: Path, tiny_directory: Path) -> None:
    start = _reference_after(tmp_path, tiny_directory, 1)["reference"]
    one, two, three = (_reference_after(tmp_path, tiny_directory, n, reference_every=2) for n in (1, 2, 3))
    for name, value in start.items():
        assert (one["reference"][name] == value).all()  # not yet
        assert (two["reference"][name] == two["parameters"][name]).all()
        assert (three["reference"][name] == two["parameters"][name]).all()
        assert not (three["parameters"][name] == two["parameters"][name]).all()
    average = _reference_after(tmp_path, tiny_directory, 2, reference_every=2, reference_share=0.25)
    for name, value in start.items():
        expected = 0.75 * value + 0.25 * average["parameters"][name]
        assert average["reference"][name] == pytest.approx(expected, abs=1e-6), name
    assert three["metrics"][2]["actor/ref_kl"] == pytest.approx(0.0, abs=1e-6)  # sampled by the reference itself
    assert two["metrics"][1]["actor/ref_kl"] > 1e-6


MOVING: dict[str, Any] = {
    "kl_coef": 0.1,
    "kl_target": 0.01,
    "kl_horizon": 100,
    "reference_every": 1,
    "reference_share": 0.5,
    "entropy_target": 9.0,
    "max_rl_steps": 3,
    "save": True,
}


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("fsdp2_rl", 2)])
def test_a_moving_reference_and_both_weights_resume_bit_for_bit(
    tmp_path: Path, tiny_directory: Path, strategy: str, ranks: int
) -> None:
    def run(folder: str, **settings: Any) -> list[dict[str, Any]]:
        every: dict[str, Any] = {**MOVING, "strategy": strategy, "devices": ranks, **settings}
        if ranks == 1:
            return [_fit(tmp_path / folder, tiny_directory, **every)]
        return run_distributed(
            _fit, ranks, tmp_path / folder, tiny_directory, init_process_group=False, timeout=120.0, **every
        )

    whole = run("whole")
    rest = run("rest", ckpt_path=str(tmp_path / "whole" / "checkpoints" / "rl_step=000001.ckpt"))
    for one, other in zip(whole, rest, strict=True):
        assert one["coefs"] == other["coefs"]
        assert one["coefs"][1] == pytest.approx(0.015)
        for a, b in zip(one["metrics"][1:], other["metrics"], strict=True):
            assert a["actor/ref_kl"] == b["actor/ref_kl"]
            assert a["actor/entropy_coef"] == b["actor/entropy_coef"]
        for name, value in one["parameters"].items():
            assert (other["parameters"][name] == value).all(), name
        for name, value in one["reference"].items():
            assert (other["reference"][name] == value).all(), name
