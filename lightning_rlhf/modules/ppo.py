"""Proximal policy optimization with a critic."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torch import nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.algorithms.aggregation import AggregationMode
from lightning_rlhf.algorithms.kl import KLEstimator
from lightning_rlhf.algorithms.registry import Corrections, PolicyLoss
from lightning_rlhf.algorithms.value_losses import value_loss
from lightning_rlhf.contracts.engine import BaseEngine, LRScheduleFactory, OptimizerFactory
from lightning_rlhf.modules.arguments import check_choice
from lightning_rlhf.modules.clipped_policy import ClippedPolicyModule, KLPlace, OldLogProbs
from lightning_rlhf.modules.compat import Choices, Compat, as_in
from lightning_rlhf.modules.step_data import StepData
from lightning_rlhf.modules.token_advantages import token_advantages, value_metrics, whiten_over_ranks
from lightning_rlhf.rewards import RewardFunction
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CriticTrunk: TypeAlias = Literal["own", "shared"]


class PPO(ClippedPolicyModule):
    """PPO (arXiv:1707.06347) on language: one action per token, the reward on the last, advantages by GAE.

    Actor and critic are models of their own, each with its engine, optimizer and mini-batches. In an RL step the critic
    values the rollouts, then trains, then the actor does. ``policy_version`` counts the actor's optimizer steps,
    Lightning's ``global_step`` those of both, ``rl_step`` neither.

    Args:
        model: the actor: a Hugging Face directory or id, or a causal-LM module.
        reward: a callable ``(prompts, responses, metadata) -> rewards``.
        optimizer: builds the actor's optimizer from the parameters and holds the learning rate.
        lr_schedule: builds the actor's learning-rate schedule from the optimizer; stepped once per optimizer step.
        tokenizer: a tokenizer or its directory; None loads the model's.
        critic_model: a causal language model whose decoder the critic starts from; None takes the actor's. Its value
            head starts at zero.
        critic_optimizer: builds the critic's optimizer; None builds one like the actor's.
        critic_lr_schedule: builds the critic's learning-rate schedule; None keeps its rate constant.
        critic_mini_batch_size: rollouts in one optimizer step of the critic, over all ranks; a multiple or divisor of
            the actor's ``mini_batch_size``. None takes the actor's.
        critic_warmup_steps: RL steps at the start in which the critic alone trains.
        critic_trunk: ``"own"``: the critic is a model of its own. ``"shared"``, one decoder under two heads, is
            refused: an engine holds one model with one optimizer, and a shared decoder would have two losses in one
            step, so neither a learning rate, mini-batches nor a warm-up of the critic's own.
        gamma: discount per token, 0 to 1.
        lam: GAE's lambda, 0 to 1: 1 trusts the rewards alone, 0 the critic.
        value_clip: holds a new value within this distance of the one before the update, in the critic's loss; None
            does not.
        whiten_advantages: bring advantages to mean 0 and variance 1 over the tokens of all ranks, once an RL step.
        policy_loss: name of a loss in ``algorithms.losses`` or registered by ``register_policy_loss``, or a callable.
        policy_loss_args: further arguments of that loss.
        clip_low: the ratio is clipped below at ``1 - clip_low``; None takes the loss's own bound, 0.2 for ``ppo_clip``.
        clip_high: and above at ``1 + clip_high``; None likewise.
        dual_clip: bound on the loss of a negative advantage, as a multiple of it; None is off.
        rollout_correction: weighs the actor's loss by the gap between trainer and rollout engine, see ``GRPO``.
        correction_args: further arguments of that correction.
        old_log_probs_from: ``trainer`` or ``rollout``, see ``GRPO``.
        aggregation: how per-token terms become one loss, the actor's and the critic's.
        norm_length: tokens; the constant of ``seq-mean-token-sum-norm``, usually the rollout's ``max_new_tokens``.
        kl_coef: weight of the KL to the frozen starting model; 0 keeps no reference.
        kl_in: ``"loss"`` adds it to the actor's loss; ``"reward"`` takes it off each token's reward, so that the critic
            and the advantages see it.
        kl_estimator: how that KL is estimated.
        kl_target: nats per token; steers ``kl_coef`` so that the KL comes near it, see ``algorithms.kl_controller``;
            None keeps ``kl_coef``.
        kl_horizon: rollouts in which that changes ``kl_coef`` by some 20 %.
        reference_every: RL steps after which the reference moves to the actor; None keeps the starting model.
        reference_share: how far it moves, above 0: 1 copies the actor, less is one step of a moving average.
        entropy_coef: weight of the entropy of the policy's distributions, which is rewarded; 0 switches it off.
        entropy_target: nats per token; steers ``entropy_coef`` so that the entropy does not fall below it, see
            ``algorithms.entropy_controller``; None keeps ``entropy_coef``.
        entropy_step: how much ``entropy_coef`` then changes in an RL step.
        num_epochs: passes over the rollouts of one RL step, the actor's and the critic's.
        mini_batch_size: rollouts in one optimizer step of the actor, over all ranks; None takes all of an RL step.
        micro_batch_size: sequences in one forward-backward on one rank.
        max_tokens_per_micro_batch: tokens in one forward-backward on one rank; excludes ``micro_batch_size``.
        max_grad_norm: global gradient norm above which gradients are scaled down, actor and critic each; None never.
        gradient_checkpointing: recompute activations in the backward.
        logits_chunk_size: tokens whose logits are held at a time.
        share_prompts: compute what rollouts of a prompt begin with once, see ``EngineConfig``; on strategies of this
            package their own ``share_prompts`` does the same.
        lora: a ``LoRAConfig`` or ``peft.LoraConfig``; the actor's parameters stay frozen and a low-rank adapter trains,
            the reference is the model without it, and exports are merged. None trains the parameters.
        mask_truncated: leave responses that hit the length limit out of both losses.
        compat: ``"verl"`` or ``"trl"`` takes that library's choice where libraries disagree and no other argument says
            otherwise, see ``docs/algorithms.md``.
        max_rl_steps: RL steps after which training ends; None leaves it to the Trainer.
        seed: draws the mini-batches.

    Raises:
        ValueError: for numbers that cannot be meant.
    """

    def __init__(
        self,
        *,
        model: str | Path | nn.Module,
        reward: RewardFunction,
        optimizer: OptimizerFactory,
        lr_schedule: LRScheduleFactory | None = None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        critic_model: str | Path | nn.Module | None = None,
        critic_optimizer: OptimizerFactory | None = None,
        critic_lr_schedule: LRScheduleFactory | None = None,
        critic_mini_batch_size: int | None = None,
        critic_warmup_steps: int = 0,
        critic_trunk: CriticTrunk = "own",
        gamma: float = 1.0,
        lam: float = 0.95,
        value_clip: float | None = None,
        whiten_advantages: bool = True,
        policy_loss: str | PolicyLoss = "ppo_clip",
        policy_loss_args: Mapping[str, Any] | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        dual_clip: float | None = None,
        rollout_correction: Corrections = "none",
        correction_args: Mapping[str, Any] | None = None,
        old_log_probs_from: OldLogProbs = "trainer",
        aggregation: AggregationMode = "token-mean",
        norm_length: int | None = None,
        kl_coef: float = 0.0,
        kl_in: KLPlace = "loss",
        kl_estimator: KLEstimator = "k3",
        kl_target: float | None = None,
        kl_horizon: int = 10_000,
        reference_every: int | None = None,
        reference_share: float = 1.0,
        entropy_coef: float = 0.0,
        entropy_target: float | None = None,
        entropy_step: float = 0.005,
        num_epochs: int = 1,
        mini_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        max_tokens_per_micro_batch: int | None = None,
        max_grad_norm: float | None = 1.0,
        gradient_checkpointing: bool = False,
        logits_chunk_size: int = 512,
        share_prompts: bool = False,
        lora: object | None = None,
        mask_truncated: bool = False,
        compat: Compat | None = None,
        max_rl_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        said = Choices(advantage_args={}, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
        choices = as_in(compat, said, advantage="gae", policy_loss=policy_loss)
        super().__init__(
            model=model,
            reward=reward,
            optimizer=optimizer,
            lr_schedule=lr_schedule,
            tokenizer=tokenizer,
            policy_loss=policy_loss,
            policy_loss_args=policy_loss_args,
            clip_low=choices.clip_low,
            clip_high=choices.clip_high,
            dual_clip=choices.dual_clip,
            rollout_correction=rollout_correction,
            correction_args=correction_args,
            old_log_probs_from=old_log_probs_from,
            aggregation=aggregation,
            norm_length=norm_length,
            kl_coef=kl_coef,
            kl_in=kl_in,
            kl_estimator=kl_estimator,
            kl_target=kl_target,
            kl_horizon=kl_horizon,
            reference_every=reference_every,
            reference_share=reference_share,
            entropy_coef=entropy_coef,
            entropy_target=entropy_target,
            entropy_step=entropy_step,
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
        if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
            raise ValueError(f"gamma and lam must lie between 0 and 1, got {gamma} and {lam}.")
        if value_clip is not None and not value_clip > 0:
            raise ValueError(f"value_clip must be positive, got {value_clip}; None switches it off.")
        if critic_warmup_steps < 0:
            raise ValueError(f"critic_warmup_steps must be 0 or more, got {critic_warmup_steps}.")
        check_choice("critic_trunk", critic_trunk, get_args(CriticTrunk))
        if critic_trunk == "shared":
            raise ValueError(
                "critic_trunk='shared' is not supported: an engine holds one model with one optimizer, and two losses "
                "on one decoder leave the critic no learning rate, mini-batches or warm-up of its own. Leave it at "
                "'own'; the critic starts from the actor's decoder."
            )
        critic = model if critic_model is None else critic_model
        self.critic_config = dataclasses.replace(
            self.actor_config,
            role="critic",
            # a module trains in place, so the critic needs one that the actor's engine will not have changed
            model=copy.deepcopy(critic) if isinstance(critic, nn.Module) else critic,
            optimizer=critic_optimizer or optimizer,
            lr_schedule=critic_lr_schedule,
            lora=None,  # its head starts from nothing, and values need the whole decoder
        )
        self.critic_mini_batch_size = mini_batch_size if critic_mini_batch_size is None else critic_mini_batch_size
        if (
            mini_batch_size
            and self.critic_mini_batch_size
            and not _one_divides(mini_batch_size, self.critic_mini_batch_size)
        ):
            raise ValueError(
                f"critic_mini_batch_size={critic_mini_batch_size} must be a multiple or a divisor of mini_batch_size="
                f"{mini_batch_size}: the larger mini-batches are made up of the smaller ones."
            )
        self.critic_warmup_steps = critic_warmup_steps
        self.gamma, self.lam, self.value_clip = gamma, lam, value_clip
        self.whiten_advantages = whiten_advantages

    # --- what PPO has beside its policy -------------------------------------------------------------------------

    @property
    def critic(self) -> BaseEngine:
        """The value model's engine."""
        if "critic" not in self._engines:
            raise RuntimeError("The critic's engine exists only once Trainer.fit, validate or test has begun.")
        return self._engines["critic"]

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if "critic" not in self._engines:
            self.add_trained_engine("value_model", self.critic_config)

    @property
    @override
    def mini_batch_sizes(self) -> dict[str, int | None]:
        return {**super().mini_batch_sizes, "critic_mini_batch_size": self.critic_mini_batch_size}

    @property
    @override
    def plan_mini_batch_size(self) -> int | None:
        sizes = [size for size in (self.mini_batch_size, self.critic_mini_batch_size) if size is not None]
        return math.gcd(*sizes) if sizes else None

    # --- one RL step --------------------------------------------------------------------------------------------

    @override
    def add_advantages(self, data: StepData) -> StepData:
        """Values by the critic, GAE over each response, whitening over all ranks' tokens. Collective."""
        experience = data.experience
        with self.timed("values"):
            values = self.critic.infer_batch(experience).values
        if values is None:
            raise ValueError("The critic's engine gave no values; its model_type must be 'value_model'.")
        rewards = data.own_rows(data.rewards)
        advantages, returns = token_advantages(
            experience, rewards, values, gamma=self.gamma, lam=self.lam, penalties=self.kl_penalties(experience)
        )
        self.note_metrics(value_metrics(experience, values, returns, self.critic))
        if self.whiten_advantages:
            advantages = whiten_over_ranks(advantages, experience.loss_mask, self.critic)
        experience = dataclasses.replace(experience, values=values, returns=returns, advantages=advantages)
        return dataclasses.replace(data, experience=experience)

    @override
    def update(self, data: StepData) -> dict[str, float]:
        """Trains the critic, then the actor, unless the critic is still warming up. Collective."""
        with self.timed("critic_update"):
            metrics = self.train_engine(
                "critic", data.in_mini_batches(self.critic_mini_batch_size), self.value_loss, epochs=self.num_epochs
            )
        if self.rl_step < self.critic_warmup_steps:
            return metrics
        return {**metrics, **super().update(data)}

    def value_loss(self, outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
        """The critic's loss as per-token terms; see ``contracts.engine.BaseEngine.forward_backward_batch``."""
        values, old, returns = outputs.values, micro_batch.values, micro_batch.returns
        if values is None or old is None or returns is None:
            raise ValueError("The critic's loss needs the engine's values, and the experience's values and returns.")
        return value_loss(
            values, old, returns, micro_batch.loss_mask, cu_seqlens=micro_batch.cu_seqlens, clip=self.value_clip
        )


def _one_divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0
