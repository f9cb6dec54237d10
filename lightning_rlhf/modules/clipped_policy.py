"""The policy's side of GRPO and PPO: the policy loss, the KL to a reference, the entropy bonus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torch import nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.algorithms.aggregation import AggregationMode
from lightning_rlhf.algorithms.corrections import correction_metrics, effective_sample_size, mismatch_metrics
from lightning_rlhf.algorithms.kl import KLEstimator, kl_penalty
from lightning_rlhf.algorithms.kl_controller import kl_controller
from lightning_rlhf.algorithms.registry import Correction, PolicyLoss
from lightning_rlhf.contracts.engine import LRScheduleFactory, OptimizerFactory
from lightning_rlhf.metrics import Metric
from lightning_rlhf.modules.arguments import check_choice, check_policy_loss
from lightning_rlhf.modules.chosen_parts import chosen_correction, chosen_policy_loss
from lightning_rlhf.modules.on_policy import COUNTERS_KEY, OnPolicyModule
from lightning_rlhf.modules.step_data import StepData
from lightning_rlhf.rewards import RewardFunction
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

OldLogProbs: TypeAlias = Literal["trainer", "rollout"]


class ClippedPolicyModule(OnPolicyModule):
    """An on-policy algorithm whose actor trains on a loss of log-prob ratios; a subclass gives the advantages.

    The arguments are those of ``GRPO`` and ``PPO``, which hold their defaults; ``PPO`` leaves out the last five.
    """

    def __init__(
        self,
        *,
        model: str | Path | nn.Module,
        reward: RewardFunction,
        optimizer: OptimizerFactory,
        lr_schedule: LRScheduleFactory | None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None,
        clip_low: float | None,
        clip_high: float | None,
        dual_clip: float | None,
        aggregation: AggregationMode,
        norm_length: int | None,
        kl_coef: float,
        kl_estimator: KLEstimator,
        kl_target: float | None,
        kl_horizon: int,
        entropy_coef: float,
        num_epochs: int,
        mini_batch_size: int | None,
        micro_batch_size: int | None,
        max_tokens_per_micro_batch: int | None,
        max_grad_norm: float | None,
        gradient_checkpointing: bool,
        logits_chunk_size: int,
        mask_truncated: bool,
        max_rl_steps: int | None,
        seed: int,
        policy_loss: str | PolicyLoss = "ppo_clip",
        policy_loss_args: Mapping[str, Any] | None = None,
        rollout_correction: str | Correction = "none",
        correction_args: Mapping[str, Any] | None = None,
        old_log_probs_from: OldLogProbs = "trainer",
    ) -> None:
        check_policy_loss(
            clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, kl_coef=kl_coef, kl_estimator=kl_estimator
        )
        check_choice("old_log_probs_from", old_log_probs_from, get_args(OldLogProbs))
        loss = chosen_policy_loss(
            policy_loss, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, arguments=policy_loss_args
        )
        correction = chosen_correction(rollout_correction, correction_args)
        if correction is not None and old_log_probs_from == "rollout":
            raise ValueError(
                f"rollout_correction={rollout_correction!r} weighs the trainer's old log-probs against the rollout "
                "engine's; old_log_probs_from='rollout' makes them one. Leave one of the two out."
            )
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
        self.objective, self.correction = loss, correction
        self.old_log_probs_from: OldLogProbs = old_log_probs_from
        self.kl_estimator: KLEstimator = kl_estimator
        self.kl_controller = kl_controller(kl_coef, target=kl_target, horizon=kl_horizon)
        self.entropy_coef = entropy_coef

    @property
    def kl_coef(self) -> float:
        """The weight of the KL to the reference, as it is now."""
        return self.kl_controller.coef

    @property
    @override
    def uses_reference(self) -> bool:
        return self.kl_coef != 0.0

    @property
    @override
    def old_log_probs_are_rollouts(self) -> bool:
        return self.old_log_probs_from == "rollout"

    @property
    def kl_is_in_loss(self) -> bool:
        """Whether the KL to the reference is a term of the actor's loss."""
        return True

    @override
    def policy_loss(self, outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
        log_probs, mask = outputs.log_probs, micro_batch.loss_mask
        if log_probs is None:
            raise ValueError(f"{type(self).__name__}'s loss needs log_probs; the engine gave none.")
        old = log_probs.detach() if micro_batch.old_log_probs is None else micro_batch.old_log_probs
        rollout, cu_seqlens = micro_batch.rollout_log_probs, micro_batch.cu_seqlens
        loss = self.objective(log_probs, old, micro_batch.advantages, mask, cu_seqlens=cu_seqlens)
        # in bypass mode `old` is the rollout engine's own: the gap is that of the policy in training
        trainer = log_probs.detach() if self.old_log_probs_are_rollouts else old
        metrics = {**loss.metrics, **mismatch_metrics(trainer, rollout, mask)}
        terms = loss.terms
        if self.correction is not None:
            weights = self.correction(old, rollout, mask, cu_seqlens=cu_seqlens)
            terms = terms * weights
            metrics.update(correction_metrics(weights, old, rollout, mask))
        if outputs.entropy is not None:
            metrics["entropy"] = Metric.mean(outputs.entropy, mask)
        if self.entropy_coef != 0.0:
            if outputs.entropy is None:
                raise ValueError(f"entropy_coef={self.entropy_coef} needs entropies; the engine gave none.")
            terms = terms - self.entropy_coef * outputs.entropy * mask
        if micro_batch.ref_log_probs is not None:
            kl = kl_penalty(log_probs, micro_batch.ref_log_probs, self.kl_estimator) * mask
            metrics["ref_kl"] = Metric.mean(kl, mask)
            if self.kl_is_in_loss:
                terms = terms + self.kl_coef * kl
        return LossOutput(terms=terms, metrics=metrics)

    @override
    def update(self, data: StepData) -> dict[str, float]:
        metrics = super().update(data)
        if "actor/correction_weight_mean" in metrics:
            # a ratio of two means: formed once they are those of all ranks and mini-batches
            metrics["actor/effective_sample_size"] = effective_sample_size(
                metrics["actor/correction_weight_mean"], metrics["actor/correction_weight_square_mean"]
            )
        if self.uses_reference:
            metrics["actor/kl_coef"] = self.kl_coef
            kl = metrics.get("actor/ref_kl")
            if kl is not None:  # else no token trained, on any rank
                self.kl_controller.update(kl, num_rollouts=len(data.plan.facts))
        return metrics

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[COUNTERS_KEY]["kl_controller"] = self.kl_controller.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.kl_controller.load_state_dict(checkpoint[COUNTERS_KEY].get("kl_controller", {}))
