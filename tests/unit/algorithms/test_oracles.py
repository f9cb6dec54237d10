"""The same inputs through torchrl, an independent implementation: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.algorithms import losses
from lightning_rlhf.algorithms.advantages import gae
from lightning_rlhf.algorithms.aggregation import loss_weights


def inputs(seed: int) -> dict[str, Tensor]:
    """Six responses of up to 9 tokens in float64; ratios that leave the clip on both sides."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(6, 9, generator=generator, dtype=torch.float64)
    new = old + 0.4 * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([9, 1, 4, 7, 2, 9])[:, None]
    return {"log_probs": new, "old_log_probs": old, "advantages": advantages, "response_mask": mask}


@pytest.fixture(scope="module")
def torchrl_loss() -> Callable[..., Callable[[dict[str, Tensor]], Tensor]]:
    from torchrl.objectives.llm import GRPOLoss

    def build(**arguments: Any) -> Callable[[dict[str, Tensor]], Tensor]:
        loss = GRPOLoss(entropy_bonus=False, **arguments).double()

        def call(given: dict[str, Tensor]) -> Tensor:
            log_ratio = (given["log_probs"] - given["old_log_probs"]).unsqueeze(-1)
            terms, _ = loss._compute_policy_objective(log_ratio, given["advantages"].unsqueeze(-1))
            return loss._aggregate_loss_value(terms, given["response_mask"]).mean()

        return call

    return build


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("aggregation", "theirs"), [("token-mean", "token_mean"), ("seq-mean-token-mean", "prompt_mean")]
)
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28), (0.1, 0.4)])
def test_ppo_clip_is_torchrls(
    torchrl_loss: Callable[..., Any], seed: int, aggregation: str, theirs: str, clip: tuple[float, float]
) -> None:
    ours, other = inputs(seed), inputs(seed)
    for given in (ours, other):
        given["log_probs"].requires_grad_()
    output = losses.ppo_clip(**ours, clip_low=clip[0], clip_high=clip[1])
    loss = (output.terms * loss_weights(ours["response_mask"], aggregation)).sum()
    expected = torchrl_loss(clip_epsilon=clip, aggregation=theirs)(other)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    assert torch.allclose(ours["log_probs"].grad, other["log_probs"].grad, rtol=1e-6, atol=1e-9)
    assert output.metrics["clip_fraction_low"].compute() + output.metrics["clip_fraction_high"].compute() > 0.1


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_is_torchrls(gamma: float, lam: float) -> None:
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    generator = torch.Generator().manual_seed(5)
    rewards, values = torch.randn(2, 4, 11, generator=generator, dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.ones(4, 11, dtype=torch.bool), gamma=gamma, lam=lam)
    after = torch.cat([values[:, 1:], torch.zeros(4, 1, dtype=torch.float64)], dim=1)
    done = torch.zeros(4, 11, 1, dtype=torch.bool)
    done[:, -1] = True
    expected, value_target = generalized_advantage_estimate(
        gamma, lam, *(t.unsqueeze(-1) for t in (values, after, rewards)), done
    )
    # torchrl holds gamma and lambda in fp32
    assert torch.allclose(advantages, expected.squeeze(-1), rtol=1e-6, atol=1e-6)
    assert torch.allclose(returns, value_target.squeeze(-1), rtol=1e-6, atol=1e-6)
