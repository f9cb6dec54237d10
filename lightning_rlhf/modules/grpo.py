"""Group relative policy optimization."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.algorithms import advantages, losses
from lightning_rlhf.algorithms.aggregation import AggregationMode
from lightning_rlhf.algorithms.corrections import mismatch_metrics
from lightning_rlhf.algorithms.kl import KLEstimator, kl_penalty
from lightning_rlhf.contracts.engine import LRScheduleFactory, OptimizerFactory
from lightning_rlhf.metrics import Metric
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.rewards import RewardFunction
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs


class GRPO(OnPolicyModule):
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
            aggregation=aggregation,
            norm_length=norm_length,
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
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self.kl_coef = kl_coef
        self.kl_estimator: KLEstimator = kl_estimator

    @property
    @override
    def uses_reference(self) -> bool:
        return self.kl_coef != 0.0

    @override
    def estimate_advantages(self, rewards: Tensor, uids: list[str]) -> Tensor:
        return advantages.grpo(rewards, uids, normalize_std=self.normalize_std)

    @override
    def policy_loss(self, outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
        log_probs, mask = outputs.log_probs, micro_batch.loss_mask
        if log_probs is None:
            raise ValueError("GRPO's loss needs log_probs; the engine gave none.")
        old = log_probs.detach() if micro_batch.old_log_probs is None else micro_batch.old_log_probs
        loss = losses.ppo_clip(
            log_probs,
            old,
            micro_batch.advantages,
            mask,
            cu_seqlens=micro_batch.cu_seqlens,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        terms = loss.terms
        metrics = {**loss.metrics, **mismatch_metrics(old, micro_batch.rollout_log_probs, mask)}
        if outputs.entropy is not None:
            metrics["entropy"] = Metric.mean(outputs.entropy, mask)
        if micro_batch.ref_log_probs is not None:
            kl = kl_penalty(log_probs, micro_batch.ref_log_probs, self.kl_estimator) * mask
            terms = terms + self.kl_coef * kl
            metrics["ref_kl"] = Metric.mean(kl, mask)
        return LossOutput(terms=terms, metrics=metrics)
