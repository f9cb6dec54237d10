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
