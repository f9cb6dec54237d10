"""Group relative policy optimization."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.algorithms import advantages
from lightning_rlhf.algorithms.aggregation import AggregationMode
from lightning_rlhf.algorithms.kl import KLEstimator
from lightning_rlhf.contracts.engine import LRScheduleFactory, OptimizerFactory
from lightning_rlhf.modules.clipped_policy import ClippedPolicyModule
from lightning_rlhf.rewards import RewardFunction


class GRPO(ClippedPolicyModule):
    """GRPO (DeepSeekMath, arXiv:2402.03300): advantages from the rewards of a prompt's group, no critic.

    With ``normalize_std=False`` and ``aggregation="seq-mean-token-sum-norm"`` it is Dr.GRPO (arXiv:2503.20783); with
    ``clip_high`` above ``clip_low`` it has DAPO's clip-higher (arXiv:2503.14476).

    Args:
        model: a Hugging Face directory or id, or a causal-LM module.
        reward: a callable ``(prompts, responses, metadata) -> rewards``.
        optimizer: builds the optimizer from the parameters and holds the learning rate.
        lr_schedule: builds a learning-rate schedule from the optimizer; stepped once per optimizer step.
        tokenizer: a tokenizer or its directory; None loads the model's.
        normalize_std: divide by the group's standard deviation.
        clip_low: the ratio is clipped below at ``1 - clip_low``.
        clip_high: and above at ``1 + clip_high``.
        dual_clip: bound on the loss of a negative advantage, as a multiple of it; None is off.
        aggregation: how per-token terms become one loss.
        norm_length: tokens; Dr.GRPO's constant, usually the rollout's ``max_new_tokens``.
        kl_coef: weight of the KL to the frozen starting model; 0 keeps no reference.
        kl_estimator: how that KL is estimated.
        kl_target: nats per token; steers ``kl_coef`` so that the KL comes near it, see ``algorithms.kl_controller``;
            None keeps ``kl_coef``.
        kl_horizon: rollouts in which that changes ``kl_coef`` by some 20 %.
        entropy_coef: weight of the entropy of the policy's distributions, which is rewarded; 0 switches it off.
        num_epochs: passes over the rollouts of one RL step.
        mini_batch_size: rollouts in one optimizer step, over all ranks; None takes all of an RL step.
        micro_batch_size: sequences in one forward-backward on one rank.
        max_tokens_per_micro_batch: tokens in one forward-backward on one rank; excludes ``micro_batch_size``.
        max_grad_norm: global gradient norm above which gradients are scaled down; None never.
        gradient_checkpointing: recompute activations in the backward.
        logits_chunk_size: tokens whose logits are held at a time.
        mask_truncated: leave responses that hit the length limit out of the loss.
        max_rl_steps: RL steps after which training ends; None leaves it to the Trainer.
        seed: draws the mini-batches.
    """

    def __init__(
        self,
        *,
        model: str | Path | nn.Module,
        reward: RewardFunction,
        optimizer: OptimizerFactory,
        lr_schedule: LRScheduleFactory | None = None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        normalize_std: bool = True,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        aggregation: AggregationMode = "token-mean",
        norm_length: int | None = None,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        kl_target: float | None = None,
        kl_horizon: int = 10_000,
        entropy_coef: float = 0.0,
        num_epochs: int = 1,
        mini_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        max_tokens_per_micro_batch: int | None = None,
        max_grad_norm: float | None = 1.0,
        gradient_checkpointing: bool = False,
        logits_chunk_size: int = 512,
        mask_truncated: bool = False,
        max_rl_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model=model,
            reward=reward,
            optimizer=optimizer,
            lr_schedule=lr_schedule,
            tokenizer=tokenizer,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            aggregation=aggregation,
            norm_length=norm_length,
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
            kl_target=kl_target,
            kl_horizon=kl_horizon,
            entropy_coef=entropy_coef,
            num_epochs=num_epochs,
            mini_batch_size=mini_batch_size,
            micro_batch_size=micro_batch_size,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            max_grad_norm=max_grad_norm,
            gradient_checkpointing=gradient_checkpointing,
            logits_chunk_size=logits_chunk_size,
            mask_truncated=mask_truncated,
            max_rl_steps=max_rl_steps,
            seed=seed,
        )
        self.normalize_std = normalize_std

    @override
    def estimate_advantages(self, rewards: Tensor, uids: list[str]) -> Tensor:
        return advantages.grpo(rewards, uids, normalize_std=self.normalize_std)
