"""PPO through the real Trainer: actor and critic learn, every layout gives the same numbers, a run resumes exactly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.fork import run_distributed
from support.toy import Recorder, digit_reward, parameters_of, toy_data, toy_ppo, toy_trainer

from lightning_rlhf.callbacks import HFRollout, RLCheckpoint
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback

STEPS_TO_LEARN = 15
COMPARED = (
    "actor/loss",
    "actor/grad_norm",
    "actor/entropy",
    "critic/loss",
    "critic/grad_norm",
    "critic/value_mean",
    "reward/mean",
)
MANY: dict[str, Any] = {
    # two actor steps and four critic steps in each of two passes
    "num_epochs": 2,
    "mini_batch_size": 8,
    "critic_mini_batch_size": 4,
    "critic_warmup_steps": 1,
    "value_clip": 0.2,
    "kl_coef": 0.1,
    "kl_in": "reward",
    "kl_estimator": "k1",
    "kl_target": 0.01,
    "kl_horizon": 100,
    "entropy_coef": 0.01,
    "critic_optimizer": partial(torch.optim.AdamW, lr=1e-3, eps=1e-4),
    "critic_lr_schedule": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


class Steps(RLCallback):
    """Writes down each optimizer step as it is announced."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, bool, int]] = []

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        self.seen.append((step.role, step.index, step.is_last, step.rl_step))


def _fit(
    root: Path,
    model: Any,
    *,
    strategy: str = "auto",
    devices: int = 1,
    prompts_per_step: int = 4,
    num_rollouts: int = 4,
    every: int | None = None,
    save_top_k: int = 1,
    ckpt_path: str | None = None,
    **module: Any,
) -> dict[str, Any]:
    recorder, steps = Recorder(), Steps()
    callbacks: list[pl.Callback] = [recorder, steps]
    if every is not None:
        callbacks.append(RLCheckpoint(every_n_rl_steps=every, save_top_k=save_top_k))
    rollout = HFRollout(num_rollouts=num_rollouts, max_new_tokens=8, max_model_len=64)
    pl.seed_everything(11, verbose=False)
    trainer = toy_trainer(root, callbacks=callbacks, rollout=rollout, strategy=strategy, devices=devices)
    ppo = toy_ppo(model, **module)
    trainer.fit(ppo, toy_data(prompts_per_step=prompts_per_step), ckpt_path=ckpt_path)
    return {
        "steps": recorder.steps,
        "announced": steps.seen,
        "parameters": {
            f"{role}.{name}": tensor.numpy()
            for role in ("actor", "critic")
            for name, tensor in parameters_of(ppo, role=role).items()
        },
        "counters": (ppo.rl_step, ppo.policy_version, trainer.global_step),
        "kl_coef": ppo.kl_coef,
    }


def _fit_ranks(root: Path, model: Path, ranks: int, **settings: Any) -> list[dict[str, Any]]:
    return run_distributed(
        _fit,
        ranks,
        root,
        model,
        strategy="fsdp2_rl",
        devices=ranks,
        init_process_group=False,
        timeout=120.0,
        **settings,
    )


def _assert_same(one: dict[str, Any], other: dict[str, Any], *, steps: int | None = None) -> None:
    tolerance = 1e-5
    for a, b in list(zip(one["steps"], other["steps"], strict=True))[:steps]:
        assert a["metrics"].keys() == b["metrics"].keys()
        for name in set(COMPARED) & a["metrics"].keys():
            assert a["metrics"][name] == pytest.approx(b["metrics"][name], abs=tolerance), (a["rl_step"], name)
    if steps is None:
        for name, value in one["parameters"].items():
            assert torch.allclose(torch.tensor(value), torch.tensor(other["parameters"][name]), atol=tolerance), name


def _without_pushes(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A resumed run pushes its weights first, also in a step in which an unbroken one has nothing to push."""
    return [
        {**step, "metrics": {name: v for name, v in step["metrics"].items() if not name.startswith("sync/")}}
        for step in steps
    ]


def _rewards(result: dict[str, Any]) -> list[float]:
    return [step["metrics"]["reward/mean"] for step in result["steps"]]


def test_it_learns_alike_in_one_process_and_on_two_ranks(tmp_path: Path, tiny_directory: Path) -> None:
    """The reward's maximum is 1; after 15 steps the mean of the last three is at least 0.9 of it."""
    plain = _fit(tmp_path, tiny_directory, max_rl_steps=STEPS_TO_LEARN)
    rewards = _rewards(plain)
    assert sum(rewards[-3:]) / 3 >= 0.9 > 0.4 > sum(rewards[:3]) / 3
    for result in _fit_ranks(tmp_path, tiny_directory, 2, max_rl_steps=STEPS_TO_LEARN):
        on_ranks = _rewards(result)
        assert sum(on_ranks[-3:]) / 3 >= 0.9
        # sums in another order drift apart until a token is sampled differently; before, the numbers are the same
        _assert_same(plain, result, steps=5)


def test_many_mini_batches_and_everything_on_agree_over_ranks(tmp_path: Path, tiny_directory: Path) -> None:
    plain = _fit(tmp_path, tiny_directory, max_rl_steps=3, **MANY)
    assert plain["steps"][2]["metrics"]["actor/ref_kl"] != 0.0
    for result in _fit_ranks(tmp_path, tiny_directory, 2, max_rl_steps=3, **MANY):
        _assert_same(plain, result)
        assert result["kl_coef"] == pytest.approx(plain["kl_coef"], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "size", "message"),
    [(1, 6, "critic_mini_batch_size=6 does not divide the 16 rollouts"), (2, 1, "leaves some of the 2 data-parallel")],
)
def test_g02_mini_batches_of_the_critic_must_fit_too(
    tmp_path: Path, tiny_directory: Path, ranks: int, size: int, message: str
) -> None:
    def fit() -> str:
        with pytest.raises(ValueError, match=message) as refusal:
            _fit(
                tmp_path,
                tiny_directory,
                strategy="auto" if ranks == 1 else "fsdp2_rl",
                devices=ranks,
                critic_mini_batch_size=size,
            )
        return str(refusal.value)

    found = [fit()] if ranks == 1 else run_distributed(fit, ranks, init_process_group=False, timeout=120.0)
    assert len(found) == ranks


@pytest.mark.parametrize("limit", [{"micro_batch_size": 3}, {"max_tokens_per_micro_batch": 60}], ids=str)
def test_micro_batches_change_nothing(tmp_path: Path, tiny_directory: Path, limit: dict[str, int]) -> None:
    whole = _fit(tmp_path, tiny_directory, max_rl_steps=2, **MANY)
    _assert_same(whole, _fit(tmp_path, tiny_directory, max_rl_steps=2, **MANY, **limit))


def test_f06_the_three_counters_are_kept_apart(tmp_path: Path, tiny_directory: Path) -> None:
    """Five RL steps, two optimizers each stepped once: checkpoints at 2 and 4 and, the run's last, 5."""
    result = _fit(tmp_path, tiny_directory, max_rl_steps=5, every=2, save_top_k=-1)
    assert result["counters"] == (5, 5, 10)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"rl_step={step:06d}.ckpt" for step in (2, 4, 5)]
    assert [step["metrics"]["rl_step"] for step in result["steps"]] == [1, 2, 3, 4, 5]
    resumed = _fit(
        tmp_path,
        tiny_directory,
        max_rl_steps=6,
        every=2,
        save_top_k=-1,
        ckpt_path=str(tmp_path / "checkpoints" / "rl_step=000004.ckpt"),
    )
    assert resumed["counters"] == (6, 6, 12)
    assert [step["metrics"]["rl_step"] for step in resumed["steps"]] == [5, 6]


def test_the_critic_warms_up_alone_and_each_role_counts_its_own_steps(tmp_path: Path, tiny_directory: Path) -> None:
    result = _fit(tmp_path, tiny_directory, max_rl_steps=2, **MANY)
    assert result["counters"] == (2, 4, 20)  # the critic's 8 twice, the actor's 4 once
    critic = [("critic", index, index == 7) for index in range(8)]
    actor = [("actor", index, index == 3) for index in range(4)]
    assert [step[:3] for step in result["announced"]] == [*critic, *critic, *actor]
    assert [step[3] for step in result["announced"]] == [0] * 8 + [1] * 12
    first, second = (step["metrics"] for step in result["steps"])
    assert first["policy_version"] == 0
    updated = {name for name in first if name.startswith("actor/") and not name.startswith("actor/advantage_")}
    assert not updated  # advantages are estimated in every step, and train nothing yet
    assert second["critic/lr"] < first["critic/lr"]
    # the second rollouts are sampled from the unchanged actor
    assert result["steps"][1]["versions"] == [0]


@pytest.mark.parametrize(("strategy", "ranks", "saved"), [("auto", 1, 1), ("auto", 1, 3), ("fsdp2_rl", 2, 3)])
def test_it_resumes_bit_for_bit(tmp_path: Path, tiny_directory: Path, strategy: str, ranks: int, saved: int) -> None:
    """Two steps of warm-up, then two of both models: parameters, optimizers, schedule and the KL's weight go on."""

    def run(folder: str, **settings: Any) -> list[dict[str, Any]]:
        every = {**MANY, "num_epochs": 1, "critic_warmup_steps": 2, "max_rl_steps": 4, "every": 1, "save_top_k": -1}
        every.update(settings)
        if ranks == 1:
            return [_fit(tmp_path / folder, tiny_directory, **every)]
        return _fit_ranks(tmp_path / folder, tiny_directory, ranks, **every)

    unbroken = run("unbroken")
    checkpoint = tmp_path / "unbroken" / "checkpoints" / f"rl_step={saved:06d}.ckpt"
    assert checkpoint.is_dir() == (strategy == "fsdp2_rl")
    for mine, reference in zip(run("resumed", ckpt_path=str(checkpoint)), unbroken, strict=True):
        assert _without_pushes(mine["steps"]) == _without_pushes(reference["steps"][saved:])
        assert mine["counters"] == reference["counters"] == (4, 4, 20)
        assert mine["kl_coef"] == reference["kl_coef"] != 0.1
        for name, value in reference["parameters"].items():
            assert (mine["parameters"][name] == value).all(), name


def test_an_adaptive_kl_does_not_resume_from_a_fixed_one(tmp_path: Path, tiny_directory: Path) -> None:
    _fit(tmp_path, tiny_directory, max_rl_steps=1, every=1, kl_coef=0.1)
    with pytest.raises(ValueError, match="no KL weight to go on from"):
        _fit(tmp_path, tiny_directory, max_rl_steps=2, every=1, kl_coef=0.1, kl_target=0.1, ckpt_path="last")


def test_the_kl_in_the_reward_moves_the_returns_and_in_the_loss_the_loss(tmp_path: Path, tiny_directory: Path) -> None:
    """With k1 against an untouched reference the KL is exactly 0 in the first RL step, and not in the second."""
    plain, reward, loss = (
        _fit(tmp_path, tiny_directory, max_rl_steps=2, **kl)
        for kl in ({}, {"kl_coef": 0.5, "kl_in": "reward"}, {"kl_coef": 0.5, "kl_in": "loss"})
    )
    returns = [[step["metrics"]["critic/return_mean"] for step in result["steps"]] for result in (plain, reward, loss)]
    losses = [[step["metrics"]["actor/loss"] for step in result["steps"]] for result in (plain, reward, loss)]
    assert returns[0][0] == returns[1][0] == returns[2][0]
    assert losses[0][0] == losses[1][0] == losses[2][0]
    # k3 is never negative, so a reward less its KL is smaller
    assert returns[1][1] < returns[0][1]
    assert loss["steps"][1]["metrics"]["actor/ref_kl"] > 0
    assert losses[2][1] == pytest.approx(losses[0][1] + 0.5 * loss["steps"][1]["metrics"]["actor/ref_kl"], abs=1e-4)


def test_an_entropy_bonus_keeps_the_entropy_up(tmp_path: Path, tiny_directory: Path) -> None:
    entropies = [
        _fit(tmp_path, tiny_directory, max_rl_steps=8, entropy_coef=coef)["steps"][-1]["metrics"]["actor/entropy"]
        for coef in (0.0, 1.0)
    ]
    assert entropies[1] > entropies[0] + 0.5


def test_a_module_as_model_is_copied_for_the_critic(tmp_path: Path, tiny_directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    from_module = _fit(tmp_path, model, max_rl_steps=2, tokenizer=tiny_directory)
    _assert_same(_fit(tmp_path, tiny_directory, max_rl_steps=2), from_module)


def test_rows_without_a_reward_train_neither_model(tmp_path: Path, tiny_directory: Path) -> None:
    def sometimes(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float | None]:
        scores = digit_reward(prompts, responses, metadata)
        return [None if index % 4 == 0 else score for index, score in enumerate(scores)]

    with pytest.warns(UserWarning, match="reward failed"):
        metrics = _fit(tmp_path, tiny_directory, reward=sometimes, max_rl_steps=1)["steps"][0]["metrics"]
    assert metrics["reward/failed"] == 4
    assert metrics["rollout/trained_tokens"] < 16 * metrics["rollout/response_length"]
    assert metrics["critic/loss"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": 1.1}, "between 0 and 1"),
        ({"lam": -0.1}, "between 0 and 1"),
        ({"value_clip": 0.0}, "value_clip must be positive"),
        ({"critic_warmup_steps": -1}, "0 or more"),
        ({"kl_in": "nowhere"}, "kl_in='nowhere'"),
        ({"critic_trunk": "shared"}, "critic_trunk='shared' is not supported: an engine holds one model"),
        ({"rollout_correction": "icepop", "old_log_probs_from": "rollout"}, "Leave one of the two out"),
        ({"mini_batch_size": 4, "critic_mini_batch_size": 6}, "multiple or a divisor"),
        ({"kl_target": 0.1}, "must start above 0"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_ppo("nothing-is-loaded", **arguments)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy_loss": "gspo", "aggregation": "seq-mean-token-mean", "rollout_correction": "sequence_tis"},
        {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "old_log_probs_from": "rollout"},
        {"policy_loss": "kl_cov", "policy_loss_args": {"fraction": 0.1}, "compat": "verl"},
        {"rollout_correction": "icepop", "correction_args": {"high": 5.0}, "compat": "verl"},
    ],
    ids=lambda settings: settings.get("policy_loss", "ppo_clip"),
)
def test_the_actor_takes_every_loss_and_correction(
    tmp_path: Path, tiny_directory: Path, settings: dict[str, Any]
) -> None:
    result = _fit(tmp_path, tiny_directory, max_rl_steps=2, mini_batch_size=8, num_epochs=2, **settings)
    for step in result["steps"]:
        metrics = step["metrics"]
        assert metrics["actor/grad_norm"] > 0
        assert ("actor/correction_kept_fraction" in metrics) == ("rollout_correction" in settings)
        assert ("actor/dual_clip_fraction" in metrics) == (settings.get("rollout_correction") == "icepop")
        assert ("actor/selected_fraction" in metrics) == (settings.get("policy_loss") == "kl_cov")
    assert result["counters"] == (2, 8, 16)
