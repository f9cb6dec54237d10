"""The policy's side of GRPO and PPO: the policy loss, the KL to a reference, the entropy bonus."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.algorithms.aggregation import AggregationMode
from lightning_rlhf.algorithms.corrections import correction_metrics, effective_sample_size, mismatch_metrics
from lightning_rlhf.algorithms.entropy_controller import entropy_controller
from lightning_rlhf.algorithms.kl import KLEstimator, kl_penalty
from lightning_rlhf.algorithms.kl_controller import kl_controller
from lightning_rlhf.algorithms.registry import Corrections, PolicyLoss
from lightning_rlhf.contracts.engine import LRScheduleFactory, OptimizerFactory
from lightning_rlhf.engines.adapter import adapter_facts
from lightning_rlhf.metrics import Metric
from lightning_rlhf.modules.arguments import (
    check_choice,
    check_model,
    check_policy_loss,
    check_reference,
    check_reward,
)
from lightning_rlhf.modules.chosen_parts import chosen_correction, chosen_policy_loss, chosen_selection
from lightning_rlhf.modules.mini_batch_selection import select_tokens
from lightning_rlhf.modules.on_policy import COUNTERS_KEY, OnPolicyModule
from lightning_rlhf.modules.reference import move_reference
from lightning_rlhf.modules.step_data import StepData
from lightning_rlhf.rewards import RewardFunction
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs, Role

OldLogProbs: TypeAlias = Literal["trainer", "rollout"]
KLPlace: TypeAlias = Literal["loss", "reward"]


class ClippedPolicyModule(OnPolicyModule):
    """An on-policy algorithm whose actor trains on a loss of log-prob ratios; a subclass gives the advantages.

    The arguments are those of ``GRPO`` and ``PPO``, which hold their defaults.
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
        kl_in: KLPlace,
        kl_estimator: KLEstimator,
        kl_target: float | None,
        kl_horizon: int,
        reference_every: int | None,
        reference_share: float,
        entropy_coef: float,
        entropy_target: float | None,
        entropy_step: float,
        num_epochs: int,
        mini_batch_size: int | None,
        micro_batch_size: int | None,
        max_tokens_per_micro_batch: int | None,
        max_grad_norm: float | None,
        gradient_checkpointing: bool,
        logits_chunk_size: int,
        share_prompts: bool,
        lora: object | None,
        mask_truncated: bool,
        max_rl_steps: int | None,
        seed: int,
        policy_loss: str | PolicyLoss,
        policy_loss_args: Mapping[str, Any] | None,
        rollout_correction: Corrections,
        correction_args: Mapping[str, Any] | None,
        old_log_probs_from: OldLogProbs,
    ) -> None:
        check_model(model)
        check_reward(reward)
        check_policy_loss(
            clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, kl_coef=kl_coef, kl_estimator=kl_estimator
        )
        check_choice("kl_in", kl_in, get_args(KLPlace))
        check_reference(kl_coef=kl_coef, every=reference_every, share=reference_share, has_adapter=lora is not None)
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
            share_prompts=share_prompts,
            lora=lora,
            mask_truncated=mask_truncated,
            max_rl_steps=max_rl_steps,
            seed=seed,
        )
        self.objective, self.correction = loss, correction
        self.old_log_probs_from: OldLogProbs = old_log_probs_from
        self.kl_estimator: KLEstimator = kl_estimator
        self.kl_controller = kl_controller(kl_coef, target=kl_target, horizon=kl_horizon)
        self.entropy_controller = entropy_controller(entropy_coef, target=entropy_target, step=entropy_step)
        self.kl_in: KLPlace = kl_in
        self.reference_every, self.reference_share = reference_every, reference_share
        self._selection = chosen_selection(policy_loss, loss)

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
    @override
    def uses_old_log_probs(self) -> bool:
        return self.uses_reference and self.kl_in == "reward"

    @property
    @override
    def reference_moves(self) -> bool:
        return self.reference_every is not None

    @property
    def entropy_coef(self) -> float:
        """The weight of the entropy bonus, as it is now."""
        return self.entropy_controller.coef

    def kl_penalties(self, experience: Experience) -> Tensor | None:
        """``[num_tokens]``, what the KL to the reference takes off each token's reward; None if it is in the loss."""
        old, ref = experience.old_log_probs, experience.ref_log_probs
        if self.kl_in == "loss" or old is None or ref is None:
            return None
        return self.kl_coef * _masked_kl(old, ref, experience.loss_mask, self.kl_estimator)

    @override
    def policy_loss(self, outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
        log_probs, mask = outputs.log_probs, micro_batch.loss_mask
        if log_probs is None:
            raise ValueError(f"{type(self).__name__}'s loss needs log_probs; the engine gave none.")
        old = log_probs.detach() if micro_batch.old_log_probs is None else micro_batch.old_log_probs
        rollout, cu_seqlens = micro_batch.rollout_log_probs, micro_batch.cu_seqlens
        chosen = {} if micro_batch.selected is None else {"selected": micro_batch.selected}
        loss = self.objective(log_probs, old, micro_batch.advantages, mask, cu_seqlens=cu_seqlens, **chosen)
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
            terms = terms - self.entropy_coef * outputs.entropy.masked_fill(~mask, 0)
        if micro_batch.ref_log_probs is not None:
            kl = _masked_kl(log_probs, micro_batch.ref_log_probs, mask, self.kl_estimator)
            metrics["ref_kl"] = Metric.mean(kl, mask)
            if self.kl_in == "loss":
                terms = terms + self.kl_coef * kl
        return LossOutput(terms=terms, metrics=metrics)

    @override
    def before_train_batch(self, role: Role, index: int, mini_batch: Experience) -> Experience:
        """Chooses the tokens of the whole mini-batch that the policy loss treats apart, if it does. Collective."""
        if role != "actor" or self._selection is None:
            return mini_batch
        old = mini_batch.old_log_probs
        log_probs = None if index or self.old_log_probs_are_rollouts else old
        if log_probs is None:  # the policy has moved since the old ones were computed, or none were
            log_probs = self.actor.infer_batch(mini_batch).log_probs
        if log_probs is None:
            raise ValueError("The choice of tokens by covariance needs log-probs; the actor's engine gave none.")
        selected = select_tokens(
            self._selection,
            mini_batch,
            log_probs=log_probs,
            old_log_probs=log_probs if old is None else old,
            engine=self.actor,
            seed=int(np.random.SeedSequence([self.seed, self.rl_step, index]).generate_state(1)[0]),
        )
        return dataclasses.replace(mini_batch, selected=selected)

    @override
    def update(self, data: StepData) -> dict[str, float]:
        metrics = super().update(data)
        if "actor/correction_weight_mean" in metrics:
            # a ratio of two means: formed once they are those of all ranks and mini-batches
            metrics["actor/effective_sample_size"] = effective_sample_size(
                metrics["actor/correction_weight_mean"], metrics["actor/correction_weight_square_mean"]
            )
        metrics["actor/entropy_coef"] = self.entropy_coef
        if "actor/entropy" in metrics:  # else no token trained, on any rank
            self.entropy_controller.update(metrics["actor/entropy"])
        if self.uses_reference:
            metrics["actor/kl_coef"] = self.kl_coef
            kl = metrics.get("actor/ref_kl")
            if kl is not None:
                self.kl_controller.update(kl, num_rollouts=len(data.plan.facts))
        if self.reference_every is not None and (self.rl_step + 1) % self.reference_every == 0:
            with self.timed("reference"):
                move_reference(self.reference, self.actor, share=self.reference_share)
        return metrics

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[COUNTERS_KEY]["kl_controller"] = self.kl_controller.state_dict()
        checkpoint[COUNTERS_KEY]["entropy_controller"] = self.entropy_controller.state_dict()
        if self.actor_config.lora is not None:  # with which an export merges what the checkpoint holds
            checkpoint[COUNTERS_KEY]["lora"] = adapter_facts(self.actor_config.lora)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.kl_controller.load_state_dict(checkpoint[COUNTERS_KEY].get("kl_controller", {}))
        self.entropy_controller.load_state_dict(checkpoint[COUNTERS_KEY].get("entropy_controller", {}))


def _masked_kl(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: KLEstimator) -> Tensor:
    """0 off the mask, whatever stands there: a product with the mask would keep its NaN, in gradients too."""
    return kl_penalty(log_probs.masked_fill(~mask, 0), ref_log_probs.masked_fill(~mask, 0), estimator)
