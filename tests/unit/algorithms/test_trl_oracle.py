"""The same inputs through TRL's own loss, where TRL is installed (the extra ``oracles``): values and gradients."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.algorithms import losses
from lightning_rlhf.algorithms.aggregation import loss_weights
from lightning_rlhf.algorithms.kl import kl_penalty

pytest.importorskip("trl", reason="TRL is in the extra 'oracles'")

ROWS, LENGTH = 6, 9


@pytest.fixture(scope="module")
def trainer_class() -> Any:
    return pytest.importorskip("trl.trainer.grpo_trainer", reason="this TRL does not import here").GRPOTrainer


def inputs(seed: int) -> dict[str, Tensor]:
    """Responses of up to nine tokens in float64; ratios that leave the clip on both sides, one advantage a row."""
    draw = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(ROWS, LENGTH, generator=draw, dtype=torch.float64)
    new = old + 0.4 * torch.randn(ROWS, LENGTH, generator=draw, dtype=torch.float64)
    mask = torch.arange(LENGTH) < torch.tensor([9, 1, 4, 7, 2, 9])[:, None]
    advantages = torch.randn(ROWS, 1, generator=draw, dtype=torch.float64).expand(ROWS, LENGTH)
    return {"log_probs": new, "old_log_probs": old, "advantages": advantages, "response_mask": mask}


class OneProcess:
    """What TRL's loss asks of an accelerator, on one process."""

    num_processes = 1
    sync_gradients = True

    def reduce(self, values: Tensor, *, reduction: str) -> Tensor:
        return values

    def gather(self, values: Tensor) -> Tensor:
        return values


def theirs(trainer_class: Any, given: dict[str, Tensor], **settings: Any) -> Tensor:
    """``GRPOTrainer._compute_loss`` on log-probs that are given, in evaluation: no accumulation rescales it."""
    log_probs, mask = given["log_probs"], given["response_mask"]
    own = {
        "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False, "aux_loss_enabled": False,
        "vllm_importance_sampling_correction": False, "_entropy_bonus_enabled": False, "max_completion_length": LENGTH,
        "accelerator": OneProcess(), "model": SimpleNamespace(training=False),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "args": SimpleNamespace(
            delta=settings.pop("delta", None), use_bias_correction_kl=False, sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        **settings,
    }  # fmt: skip
    batch = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
        "completion_mask": mask.long(),
        "advantages": given["advantages"][:, 0],
        "old_per_token_logps": given["old_log_probs"],
        "ref_per_token_logps": given["old_log_probs"] - 0.1,
        "num_items_in_batch": mask.sum(),
    }
    loss: Tensor = trainer_class._compute_loss(SimpleNamespace(**own), None, batch)
    return loss


CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "token-mean": ("ppo_clip", {}, "token-mean", {"loss_type": "dapo"}),
    "bnpo": ("ppo_clip", {}, "token-mean", {"loss_type": "bnpo"}),
    "clip-higher": ("ppo_clip", {"clip_high": 0.28}, "token-mean", {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dual clip": ("ppo_clip", {"dual_clip": 3.0}, "token-mean", {"loss_type": "dapo", "delta": 3.0}),
    "grpo": ("ppo_clip", {}, "seq-mean-token-mean", {}),
    "dr_grpo": ("ppo_clip", {}, "seq-mean-token-sum-norm", {"loss_type": "dr_grpo"}),
    "gspo": ("gspo", {}, "seq-mean-token-mean", {"importance_sampling_level": "sequence"}),
    "sapo": ("sapo", {}, "seq-mean-token-mean", {"loss_type": "sapo"}),
    "cispo": ("cispo", {"clip_low": 1.0, "clip_high": 4.0}, "token-mean", {"loss_type": "cispo", "epsilon_high": 5.0}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_its_gradient_are_trls(trainer_class: Any, case: str, seed: int) -> None:
    name, arguments, mode, settings = CASES[case]
    ours, other = inputs(seed), inputs(seed)
    for given in (ours, other):
        given["log_probs"].requires_grad_()
    terms = getattr(losses, name)(**ours, **arguments).terms
    loss = (terms * loss_weights(ours["response_mask"], mode, norm_length=LENGTH)).sum()
    expected = theirs(trainer_class, other, **settings)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    assert torch.allclose(ours["log_probs"].grad, other["log_probs"].grad, rtol=1e-5, atol=1e-8)


def test_the_kl_is_trls(trainer_class: Any) -> None:
    ours, other = inputs(0), inputs(0)
    weights = loss_weights(ours["response_mask"], "token-mean")
    terms = losses.ppo_clip(**ours).terms
    kl = kl_penalty(ours["log_probs"], ours["old_log_probs"] - 0.1, "k3")
    loss = ((terms + 0.3 * kl * ours["response_mask"]) * weights).sum()
    expected = theirs(trainer_class, other, loss_type="dapo", beta=0.3)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
