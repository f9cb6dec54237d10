"""The actor's loss with every term on: what stands off the loss mask reaches neither a term nor a gradient."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from support.experience import make_experience

from lightning_rlhf.modules import GRPO
from lightning_rlhf.types import ModelOutputs


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k3+"])
def test_nothing_off_the_mask_is_read(estimator: Any) -> None:
    module = GRPO(
        model="nothing-is-loaded",
        reward=lambda p, r, m: [0.0] * len(p),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        kl_coef=0.1,
        kl_estimator=estimator,
        entropy_coef=0.01,
        rollout_correction="token_tis",
    )
    data = make_experience([6, 4, 3])
    mask = data.loss_mask
    assert 0 < int(mask.sum()) < mask.numel()
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(data.num_tokens, generator=draw) for _ in range(5)]

    def terms_and_gradients(poison: float) -> list[torch.Tensor]:
        # fresh leaves: gradients of two calls must not be summed
        new, entropy, old, ref, rollout = (values.masked_fill(~mask, poison) for values in drawn)
        new.requires_grad_(), entropy.requires_grad_()
        batch = dataclasses.replace(data, old_log_probs=old, ref_log_probs=ref, rollout_log_probs=rollout)
        output = module.policy_loss(ModelOutputs(log_probs=new, entropy=entropy), batch)
        output.terms.sum().backward()
        assert new.grad is not None
        assert entropy.grad is not None
        assert all(math.isfinite(value.compute() or 0.0) for value in output.metrics.values())
        return [output.terms.detach(), new.grad, entropy.grad]

    for poison in (math.nan, math.inf, -math.inf):
        for found, clean in zip(terms_and_gradients(poison), terms_and_gradients(0.0), strict=True):
            assert torch.equal(found, clean)
            assert (found[~mask] == 0).all()
