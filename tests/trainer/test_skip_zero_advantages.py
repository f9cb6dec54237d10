"""Rows without an advantage left out of the update: the same weights, from fewer tokens."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import DistributedError, run_distributed
from support.megatron_imports import megatron_is_imported  # noqa: F401
from support.toy import Recorder, digit_reward, parameters_of, toy_data, toy_module, toy_trainer

from lightning_rlhf.modules import GRPO
from lightning_rlhf.parity.tiny_models import tiny_model
from lightning_rlhf.strategies import MegatronRLStrategy
from lightning_rlhf.types import Experience, Role

SAME = ("actor/loss", "actor/grad_norm", "reward/mean", "reward/groups_without_signal", "rollout/trained_tokens")


def _only_odd_prompts_differ(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    rewards = digit_reward(prompts, responses, metadata)
    return [reward if int(prompt.split()[0]) % 2 else 0.5 for prompt, reward in zip(prompts, rewards, strict=True)]


class _Counting(GRPO):
    """Counts the rows that reach the engine."""

    rows = 0

    def before_train_batch(self, role: Role, index: int, mini_batch: Experience) -> Experience:
        kept = super().before_train_batch(role, index, mini_batch)
        self.rows += len(kept)
        return kept


def _fit(root: Path, model: Path, strategy: str, devices: int, **module: Any) -> dict[str, Any]:
    recorder = Recorder()
    trainer = toy_trainer(root, callbacks=[recorder], strategy=strategy, devices=devices)
    grpo = toy_module(model, reward=_only_odd_prompts_differ, max_rl_steps=3, **module)
    grpo.__class__ = _Counting
    trainer.fit(grpo, toy_data())
    return {
        "steps": recorder.steps,
        "rows": getattr(grpo, "rows", 0),
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_update_is_that_of_all_rows(tmp_path: Path, tiny_directory: Path, ranks: int) -> None:
    settings: dict[str, Any] = {"mini_batch_size": 8, "normalize_std": False}
    whole = _fit(tmp_path, tiny_directory, "auto", 1, **settings)
    if ranks == 1:
        found = [_fit(tmp_path, tiny_directory, "auto", 1, skip_zero_advantages=True, **settings)]
    else:
        found = run_distributed(
            lambda: _fit(tmp_path, tiny_directory, "fsdp2_rl", 2, skip_zero_advantages=True, **settings),
            2,
            init_process_group=False,
            timeout=120.0,
        )
    for one in found:
        for expected, actual in zip(whole["steps"], one["steps"], strict=True):
            for name in SAME:
                assert actual["metrics"][name] == pytest.approx(expected["metrics"][name], abs=1e-5), name
        for name, value in whole["parameters"].items():
            assert torch.allclose(torch.tensor(one["parameters"][name]), torch.tensor(value), atol=1e-5), name
    assert whole["rows"] == 3 * 16
    without = sum(round(step["metrics"]["reward/groups_without_signal"] * 16) for step in whole["steps"])
    assert without >= 3 * 8  # the even prompts' at least
    assert sum(one["rows"] for one in found) == 3 * 16 - without


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kl_coef": 0.1}, "kl_coef=0.1"),
        ({"entropy_coef": 0.01}, "entropy_coef=0.01"),
        ({"entropy_target": 1.0}, "entropy_target=1.0"),
        ({"kl_coef": 0.1, "kl_in": "reward", "kl_target": 0.5}, "kl_target=0.5"),
        ({"policy_loss": "kl_cov"}, "kl_cov"),
        ({"policy_loss": lambda *given, **named: given[0]}, "policy_loss=<function"),
    ],
)
def test_refused_where_a_row_without_advantage_has_a_gradient(
    tiny_directory: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"skip_zero_advantages.*{named}"):
        toy_module(tiny_directory, skip_zero_advantages=True, **settings)
    toy_module(tiny_directory, skip_zero_advantages=True, kl_coef=0.1, kl_in="reward")


@pytest.mark.parametrize(
    ("settings", "refused"),
    [({}, False), ({"moe_aux_loss_coef": 0.1}, True), ({"moe_z_loss_coef": 0.1}, True)],
    ids=["no_loss", "aux_loss", "z_loss"],
)
def test_refused_where_every_row_trains_the_routers(
    tmp_path: Path, tiny_directory: Path, settings: dict[str, float], refused: bool
) -> None:
    model = tmp_path / "experts"
    tiny_model("tiny-qwen3-moe").save_pretrained(model)

    def fit() -> None:
        trainer = toy_trainer(tmp_path, strategy=MegatronRLStrategy(**settings))
        module = toy_module(model, tokenizer=tiny_directory, skip_zero_advantages=True, max_rl_steps=1)
        trainer.fit(module, toy_data())

    with pytest.raises(DistributedError, match=r"skip_zero_advantages.*routers") if refused else nullcontext():
        run_distributed(fit, 1, init_process_group=False, timeout=120.0)
