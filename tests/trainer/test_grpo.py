"""GRPO through the real Trainer: it learns, and every layout gives the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import HFRollout

COMPARED = ("actor/loss", "actor/grad_norm", "actor/entropy", "reward/mean", "reward/std", "rollout/trained_tokens")


def _fit(root: Path, directory: Any, *, strategy: str = "auto", devices: int = 1, **module: Any) -> dict[str, Any]:
    recorder = Recorder()
    trainer = toy_trainer(root, callbacks=[recorder], strategy=strategy, devices=devices)
    grpo = toy_module(directory, **module)
    trainer.fit(grpo, toy_data())
    return {
        "steps": recorder.steps,
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
        "global_step": trainer.global_step,
        "rl_step": grpo.rl_step,
        "policy_version": grpo.policy_version,
    }


def _fit_ranks(root: Path, model: Path, ranks: int, **module: Any) -> list[dict[str, Any]]:
    return run_distributed(
        _fit, ranks, root, model, strategy="fsdp2_rl", devices=ranks, init_process_group=False, timeout=120.0, **module
    )


def _assert_same(one: dict[str, Any], other: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    assert len(one["steps"]) == len(other["steps"])
    for a, b in zip(one["steps"], other["steps"], strict=True):
        for name in COMPARED:
            assert a["metrics"][name] == pytest.approx(b["metrics"][name], abs=tolerance), (a["rl_step"], name)
    for name, value in one["parameters"].items():
        assert torch.allclose(torch.tensor(value), torch.tensor(other["parameters"][name]), atol=tolerance), name


def test_reward_rises_on_a_plain_strategy(tmp_path: Path, tiny_directory: Path) -> None:
    result = _fit(tmp_path, tiny_directory, max_rl_steps=10)
    rewards = [step["metrics"]["reward/mean"] for step in result["steps"]]
    assert sum(rewards[-2:]) / 2 > 0.8 > 0.4 > sum(rewards[:2]) / 2
    assert (result["rl_step"], result["global_step"], result["policy_version"]) == (10, 10, 10)
    assert [step["versions"] for step in result["steps"]] == [[version] for version in range(10)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2_gives_the_numbers_of_one_plain_process(tmp_path: Path, tiny_directory: Path, ranks: int) -> None:
    plain = _fit(tmp_path, tiny_directory)
    results = _fit_ranks(tmp_path, tiny_directory, ranks)
    for result in results:
        _assert_same(plain, result)
    # the first rollouts are sampled from equal weights: token for token the same, whichever rank samples them
    first = [sorted(result["steps"][0]["uids"]) for result in results]
    assert sorted(uid for uids in first for uid in uids) == sorted(plain["steps"][0]["uids"])
    assert [t for r in results for t in r["steps"][0]["tokens"]] == plain["steps"][0]["tokens"]


def test_several_mini_batches_and_epochs_agree_over_ranks(tmp_path: Path, tiny_directory: Path) -> None:
    settings: dict[str, Any] = {"mini_batch_size": 4, "num_epochs": 2, "max_rl_steps": 2, "kl_coef": 0.1}
    plain = _fit(tmp_path, tiny_directory, **settings)
    assert (plain["rl_step"], plain["global_step"], plain["policy_version"]) == (2, 16, 16)
    assert plain["steps"][1]["metrics"]["actor/ratio_max"] > 1.0  # later mini-batches are off-policy
    assert plain["steps"][1]["metrics"]["actor/ref_kl"] > 0.0
    for result in _fit_ranks(tmp_path, tiny_directory, 2, **settings):
        _assert_same(plain, result)


@pytest.mark.parametrize(
    "limit", [{"micro_batch_size": 1}, {"micro_batch_size": 3}, {"max_tokens_per_micro_batch": 60}]
)
def test_micro_batches_change_nothing(tmp_path: Path, tiny_directory: Path, limit: dict[str, int]) -> None:
    whole = _fit(tmp_path, tiny_directory, max_rl_steps=2)
    _assert_same(whole, _fit(tmp_path, tiny_directory, max_rl_steps=2, **limit))


def test_a_single_update_needs_no_old_log_probs(tmp_path: Path, tiny_directory: Path) -> None:
    """Its ratio is one by construction; recomputing them gives the same update."""

    def with_old_log_probs() -> dict[str, Any]:
        recorder = Recorder()
        trainer = toy_trainer(tmp_path, callbacks=[recorder])
        grpo = toy_module(tiny_directory, max_rl_steps=2)
        make = grpo.make_experience

        def made(*args: Any) -> Any:
            import dataclasses

            data = make(*args)
            assert data.experience.old_log_probs is None
            old = grpo.actor.infer_batch(data.experience).log_probs
            return dataclasses.replace(data, experience=dataclasses.replace(data.experience, old_log_probs=old))

        grpo.make_experience = made  # type: ignore[method-assign]
        trainer.fit(grpo, toy_data())
        parameters = {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()}
        return {"steps": recorder.steps, "parameters": parameters}

    _assert_same(_fit(tmp_path, tiny_directory, max_rl_steps=2), with_old_log_probs())


def test_a_failing_reward_masks_its_rows_and_is_counted(tmp_path: Path, tiny_directory: Path) -> None:
    def sometimes(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float | None]:
        return [None if index % 4 == 0 else float(len(r)) for index, r in enumerate(responses)]

    with pytest.warns(UserWarning, match="reward failed"):
        result = _fit(tmp_path, tiny_directory, reward=sometimes, max_rl_steps=1)
    metrics = result["steps"][0]["metrics"]
    assert metrics["reward/failed"] == 4
    sampled = metrics["rollout/response_length"] * 16
    assert metrics["rollout/trained_tokens"] < sampled


def test_a_step_without_any_signal_does_not_fail(tmp_path: Path, tiny_directory: Path) -> None:
    for value in (1.0, None):
        result = _fit(tmp_path, tiny_directory, reward=lambda p, r, m, value=value: [value] * len(r), max_rl_steps=1)
        metrics = result["steps"][0]["metrics"]
        assert metrics["actor/loss"] == 0.0
        assert metrics["actor/grad_norm"] == 0.0
        assert metrics["reward/groups_without_signal"] == 1.0


def test_a_step_of_prompts_that_leave_no_room_warns(tmp_path: Path, tiny_directory: Path) -> None:
    rollout = HFRollout(num_rollouts=2, max_new_tokens=2, max_model_len=3)
    recorder = Recorder()
    trainer = toy_trainer(tmp_path, rollout=rollout, callbacks=[recorder])
    with pytest.warns(UserWarning, match="all 8 rows were skipped.* raise max_model_len"):
        trainer.fit(toy_module(tiny_directory, max_rl_steps=1), toy_data())
    assert recorder.steps[0]["metrics"]["rollout/skipped"] == 8


def test_validation_scores_greedy_responses_of_the_current_policy(tmp_path: Path, tiny_directory: Path) -> None:
    from lightning_rlhf.data import ListPrompts

    trainer = toy_trainer(tmp_path, check_val_every_n_epoch=None, val_check_interval=2, num_sanity_val_steps=1)
    grpo = toy_module(tiny_directory, max_rl_steps=4)
    trainer.fit(grpo, toy_data(val_source=ListPrompts(["7 + 7 =", "8 + 8 ="])))
    assert 0.0 <= float(trainer.callback_metrics["val/reward"]) <= 1.0


def test_truncated_responses_can_be_left_out(tmp_path: Path, tiny_directory: Path) -> None:
    result = _fit(tmp_path, tiny_directory, mask_truncated=True, max_rl_steps=1)
    metrics = result["steps"][0]["metrics"]
    assert 0 < metrics["rollout/truncated_fraction"] < 1
    assert metrics["rollout/trained_tokens"] < 16 * metrics["rollout/response_length"]


def test_a_module_as_model_is_sampled_from_too(tmp_path: Path, tiny_directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    from_path = _fit(tmp_path, tiny_directory, max_rl_steps=2)
    from_module = _fit(tmp_path, model, max_rl_steps=2, tokenizer=tiny_directory)
    _assert_same(from_path, from_module)


def test_another_seed_samples_other_responses(tmp_path: Path, tiny_directory: Path) -> None:
    tokens = []
    for seed in (0, 0, 1):
        recorder = Recorder()
        rollout = HFRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64, seed=seed)
        toy_trainer(tmp_path, callbacks=[recorder], rollout=rollout).fit(
            toy_module(tiny_directory, max_rl_steps=1), toy_data()
        )
        tokens.append(recorder.steps[0]["tokens"])
    assert tokens[0] == tokens[1] != tokens[2]
