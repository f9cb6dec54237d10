"""Arguments that cannot be meant are refused by the constructor, before any model loads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_rlhf.modules import GRPO


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_low": -1.0}, "clip_low=-1.0"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1"),
        ({"kl_coef": -0.1}, "kl_coef must be a number of at least 0, got -0.1"),
        ({"kl_coef": float("nan")}, "kl_coef must be a number of at least 0, got nan"),
        ({"kl_estimator": "k4"}, "kl_estimator='k4' is not one of k1, k2, k3"),
        ({"aggregation": "token_mean"}, "aggregation='token_mean' is not one of token-mean"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "give norm_length"),
        ({"norm_length": 0}, "norm_length must be at least 1, got 0"),
        ({"num_epochs": 0}, "num_epochs must be at least 1, got 0"),
        ({"mini_batch_size": 0}, "mini_batch_size must be at least 1, got 0"),
        ({"max_rl_steps": -1}, "max_rl_steps must be at least 1, got -1"),
        ({"seed": -1}, "seed must not be negative"),
        ({"micro_batch_size": 2, "max_tokens_per_micro_batch": 9}, "not both"),
        ({"logits_chunk_size": 0}, "logits_chunk_size must be positive"),
        ({"advantage": "gpro"}, "advantage='gpro' is not one of gdpo, gpg, grpo"),
        ({"advantage": "gdpo", "kl_in": "reward", "kl_coef": 0.1}, "change their sum alone"),
        ({"advantage": "gdpo", "overlong_max_tokens": 8, "overlong_cache_tokens": 2}, "change their sum alone"),
        ({"advantage": "remax", "advantage_args": {"baselines": 1}}, "advantage='remax' takes no baselines"),
        ({"length_penalty": "short"}, "length_penalty='short' is not one of linear, relative"),
        ({"length_penalty": "linear", "length_penalty_args": {"per_token": -1.0}}, "per_token is a price"),
        ({"length_penalty": "linear", "length_penalty_args": {"weight": 1.0}}, "takes no weight; it takes per_token"),
        ({"length_penalty_args": {"weight": 1.0}}, "without a length_penalty"),
        ({"advantage": "gdpo", "length_penalty": "linear"}, "change their sum alone"),
        ({"kl_in": "nowhere"}, "kl_in='nowhere' is not one of loss, reward"),
        ({"reference_every": 2}, "a reference that kl_coef=0 does not keep"),
        ({"reference_every": 0, "kl_coef": 0.1}, "reference_every must be at least 1 RL step"),
        ({"reference_share": 0.5, "kl_coef": 0.1}, "reference_share=0.5 without reference_every"),
        ({"reference_every": 1, "reference_share": 0.0, "kl_coef": 0.1}, "reference_share must lie above 0"),
        ({"entropy_target": 0.0}, "entropy_target and entropy_step above 0"),
        ({"entropy_target": 1.0, "entropy_coef": -0.1}, "entropy_coef of 0 or more"),
        ({"compat": "openrlhf"}, "compat='openrlhf' is not one of verl, trl"),
        ({"advantage": "rloo", "normalize_std": False}, "normalize_std=False means nothing to advantage='rloo'"),
        ({"advantage": "opo", "advantage_args": {"lengths": 3}}, "advantage='opo' takes no lengths; it takes nothing"),
        ({"policy_loss": "ppo"}, "policy_loss='ppo' is not one of cispo"),
        ({"policy_loss": "clip_cov", "policy_loss_args": {"selected": 1}}, "policy_loss='clip_cov' takes no selected"),
        ({"policy_loss": "kl_cov", "policy_loss_args": {"fraction": 2.0}}, "fraction must lie between 0 and 1"),
        ({"policy_loss": "sapo", "clip_high": 0.2}, "takes no clip_high; it takes tau_positive, tau_negative"),
        ({"policy_loss": "gspo", "dual_clip": 3.0}, "policy_loss='gspo' takes no dual_clip"),
        ({"policy_loss": "gspo", "policy_loss_args": {"level": "word"}}, "level must be 'sequence' or 'token'"),
        ({"policy_loss": "dppo_tv", "policy_loss_args": {"ratio_cap": 0}}, "ratio_cap must be positive, got 0"),
        ({"clip_low": 0.1, "policy_loss_args": {"clip_low": 0.1}}, "policy_loss_args holds clip_low"),
        ({"rollout_correction": "tis"}, "rollout_correction='tis' is not one of geometric_mask"),
        ({"rollout_correction": "icepop", "correction_args": {"cap": 2}}, "takes no cap; it takes low, high"),
        ({"rollout_correction": "icepop", "correction_args": {"low": 3}}, "got 3 and 2.0"),
        ({"correction_args": {"cap": 2}}, "without a rollout_correction"),
        ({"old_log_probs_from": "vllm"}, "old_log_probs_from='vllm' is not one of trainer, rollout"),
        ({"old_log_probs_from": "rollout", "rollout_correction": "icepop"}, "Leave one of the two out"),
        ({"overlong_max_tokens": 8}, "or neither of them; got None and 8"),
        ({"overlong_max_tokens": 8, "overlong_cache_tokens": 9}, "got 9 and 8"),
    ],
)
def test_it_is_named_with_what_was_got(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPO(
            model="no/such/model",
            reward=lambda prompts, responses, metadata: [0.0],
            optimizer=partial(torch.optim.AdamW, lr=1e-6),
            **arguments,
        )
