"""Whatever a run logs stands in the table of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from support.toy import digit_reward, toy_data, toy_module, toy_ppo, toy_trainer

from lightning_rlhf.callbacks import Throughput
from lightning_rlhf.cli.run_records import read_history
from lightning_rlhf.data import ListPrompts
from lightning_rlhf.metric_names import describe
from lightning_rlhf.rewards import WeightedRewards


def length_reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    return [float(len(response)) for response in responses]


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": (
        toy_module,
        {
            "kl_coef": 0.01,
            "entropy_coef": 0.01,
            "rollout_correction": "token_tis",
            "mini_batch_size": 8,
            "dual_clip": 3.0,
        },
    ),
    "components": (
        toy_module,
        {
            "reward": WeightedRewards([(digit_reward, 1.0), (length_reward, 0.1)]),
            "overlong_max_tokens": 8,
            "overlong_cache_tokens": 2,
        },
    ),
    "covariance": (toy_module, {"policy_loss": "clip_cov", "mini_batch_size": 8}),
    "ppo": (toy_ppo, {"kl_coef": 0.01, "kl_in": "reward", "value_clip": 0.2, "mini_batch_size": 8}),
}

ALWAYS = """
reward/mean reward/std actor/advantage_mean actor/advantage_std actor/advantage_min actor/advantage_max
rollout/response_length rollout/response_length_max rollout/truncated_fraction rollout/staleness_mean
rollout/staleness_max actor/loss actor/grad_norm actor/lr actor/entropy actor/num_micro_batches actor/padding_fraction
actor/mismatch_abs_mean actor/mismatch_kl throughput/tokens_per_second throughput/mfu memory/peak_host
time/step time/rollout time/reward time/update time/sync time/other
"""
"""What every run logs, whatever its algorithm."""
OF_GRPO = """
actor/ratio_mean actor/ratio_min actor/ratio_max actor/clip_fraction_low actor/clip_fraction_high actor/approx_kl
actor/ref_kl time/old_log_probs time/ref_log_probs
"""
"""And a run with a reference and several optimizer steps."""


@pytest.mark.parametrize("run", list(RUNS))
def test_every_logged_name_has_a_row(tmp_path: Path, tiny_directory: Path, run: str) -> None:
    make, changes = RUNS[run]
    trainer = toy_trainer(
        tmp_path, callbacks=[Throughput(peak_flops=1e9)], logger=CSVLogger(tmp_path, name="csv"), log_every_n_steps=1
    )
    module = make(tiny_directory, max_rl_steps=2, **changes)
    trainer.fit(module, toy_data(val_source=ListPrompts(["1 + 1 ="])))
    history = read_history(tmp_path)
    assert set(ALWAYS.split()) <= set(history)
    if run == "grpo":
        assert set(OF_GRPO.split()) <= set(history)
    for name in {*history, *module.last_metrics, *trainer.callback_metrics}:
        describe(name)
    # what only one kind of run logs is there, or this test would be blind to it
    expected = {
        "grpo": "actor/effective_sample_size", "components": "reward/length_reward",
        "covariance": "actor/selected_fraction", "ppo": "critic/value_mean",
    }[run]  # fmt: skip
    assert expected in history
