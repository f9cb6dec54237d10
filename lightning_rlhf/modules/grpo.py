"""Group relative policy optimization, and the family of algorithms that need no critic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.algorithms.aggregation import AggregationMode
from lightning_rlhf.algorithms.kl import KLEstimator
from lightning_rlhf.algorithms.registry import AdvantageEstimator, Corrections, LengthPenalty, PolicyLoss
from lightning_rlhf.contracts.engine import LRScheduleFactory, OptimizerFactory
from lightning_rlhf.modules.arguments import check_overlong
from lightning_rlhf.modules.chosen_parts import chosen_advantage, chosen_length_penalty
from lightning_rlhf.modules.clipped_policy import ClippedPolicyModule, KLPlace, OldLogProbs
from lightning_rlhf.modules.compat import Choices, Compat, as_in
from lightning_rlhf.modules.signal import check_engine_skips, check_skips, rows_with_signal
from lightning_rlhf.modules.step_data import StepData
from lightning_rlhf.modules.token_advantages import sum_over_rows
from lightning_rlhf.rewards import RewardFunction, WeightedRewards, soft_overlong_penalty
from lightning_rlhf.types import Experience, Role, Rollouts


class GRPO(ClippedPolicyModule):
    """GRPO (DeepSeekMath, arXiv:2402.03300): advantages from the rewards of a prompt's group, no critic.

    ``advantage``, ``policy_loss`` and ``aggregation`` are chosen apart, so that the class is the whole family: Dr.GRPO
    (arXiv:2503.20783) is ``normalize_std=False`` and ``aggregation="seq-mean-token-sum-norm"``; DAPO, GSPO, CISPO, RLOO
    and REINFORCE++ each have a file in ``configs/algorithm``. ``docs/algorithms.md`` lists what there is.

    Args:
        model: a Hugging Face directory or id, or a causal-LM module.
        reward: a callable ``(prompts, responses, metadata) -> rewards``.
        optimizer: builds the optimizer from the parameters and holds the learning rate.
        lr_schedule: builds a learning-rate schedule from the optimizer; stepped once per optimizer step.
        tokenizer: a tokenizer or its directory; None loads the model's.
        advantage: name of an estimator in ``algorithms.advantages`` or registered by ``register_advantage``, or a
            callable ``(rewards, uids) -> advantages``, see ``algorithms.registry``.
        advantage_args: further arguments of that estimator.
        normalize_std: divide by the group's standard deviation, in the estimators that do.
        policy_loss: name of a loss in ``algorithms.losses`` or registered by ``register_policy_loss``, or a callable.
        policy_loss_args: further arguments of that loss.
        clip_low: the ratio is clipped below at ``1 - clip_low``; None takes the loss's own bound, 0.2 for ``ppo_clip``.
        clip_high: and above at ``1 + clip_high``; None likewise.
        dual_clip: bound on the loss of a negative advantage, as a multiple of it; None is off.
        rollout_correction: weighs the loss's terms by the gap between trainer and rollout engine: ``none``, a name in
            ``algorithms.corrections`` (``token_tis``, ``sequence_tis``, ``icepop``, ``sequence_mask``,
            ``geometric_mask``, ``veto``), a callable, or a list of them, whose weights are multiplied.
        correction_args: further arguments of that correction; for a list, each one's by its name.
        old_log_probs_from: whose log-probs the ratio's denominator holds: ``trainer`` computes them before the update;
            ``rollout`` takes those the tokens were sampled with (no forward, and the ratio then corrects the gap too).
        aggregation: how per-token terms become one loss.
        norm_length: tokens; Dr.GRPO's constant, usually the rollout's ``max_new_tokens``.
        kl_coef: weight of the KL to the frozen starting model; 0 keeps no reference.
        kl_in: ``"loss"`` adds it to the actor's loss; ``"reward"`` takes it off the rewards, summed over the
            response, before advantages are estimated.
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
        num_epochs: passes over the rollouts of one RL step.
        mini_batch_size: rollouts in one optimizer step, over all ranks; None takes all of an RL step.
        micro_batch_size: sequences in one forward-backward on one rank.
        max_tokens_per_micro_batch: tokens in one forward-backward on one rank; excludes ``micro_batch_size``.
        max_grad_norm: global gradient norm above which gradients are scaled down; None never.
        gradient_checkpointing: recompute activations in the backward.
        logits_chunk_size: tokens whose logits are held at a time.
        share_prompts: compute what rollouts of a prompt begin with once, see ``EngineConfig``; on strategies of this
            package their own ``share_prompts`` does the same.
        lora: a ``LoRAConfig`` or ``peft.LoraConfig``; the parameters stay frozen and a low-rank adapter trains, the
            reference is the model without it, and exports are merged. None trains the parameters.
        skip_zero_advantages: leave rows whose advantages are all zero, such as groups with equal rewards, out of the
            update. Loss and gradient stay the same; the actor's metrics are then those of the rows that are left.
        mask_truncated: leave responses that hit the length limit out of the loss (DAPO's overlong filtering).
        overlong_max_tokens: DAPO's soft overlong penalty takes 1 off the reward of a training response of this length,
            see ``rewards.soft_overlong_penalty``; None takes nothing off.
        overlong_cache_tokens: tokens before that length over which the penalty grows from 0.
        length_penalty: adds something to each training reward by its response's length: ``linear`` or ``relative`` in
            ``algorithms.length_penalties``, or a callable; None adds nothing.
        length_penalty_args: further arguments of that penalty.
        compat: ``"verl"`` or ``"trl"`` takes that library's choice where libraries disagree and no other argument says
            otherwise, see ``docs/algorithms.md``.
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
        advantage: str | AdvantageEstimator = "grpo",
        advantage_args: Mapping[str, Any] | None = None,
        normalize_std: bool = True,
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
        skip_zero_advantages: bool = False,
        mask_truncated: bool = False,
        overlong_max_tokens: int | None = None,
        overlong_cache_tokens: int | None = None,
        length_penalty: str | LengthPenalty | None = None,
        length_penalty_args: Mapping[str, Any] | None = None,
        compat: Compat | None = None,
        max_rl_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        said = Choices(advantage_args=advantage_args or {}, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
        choices = as_in(compat, said, advantage=advantage, policy_loss=policy_loss)
        arguments = _with_weights(advantage, choices.advantage_args, reward)
        estimator = chosen_advantage(advantage, normalize_std=normalize_std, arguments=arguments)
        check_overlong(overlong_max_tokens, overlong_cache_tokens)
        penalty = chosen_length_penalty(length_penalty, length_penalty_args)
        if estimator.needs_components and (overlong_max_tokens is not None or penalty or kl_in == "reward"):
            raise ValueError(
                f"advantage={advantage!r} normalises each reward apart, and length penalties and kl_in='reward' "
                "change their sum alone. Give the penalty as a reward of its own, and kl_in='loss'."
            )
        if skip_zero_advantages:
            check_skips(
                policy_loss=policy_loss,
                kl_coef=kl_coef,
                kl_in=kl_in,
                kl_target=kl_target,
                entropy_coef=entropy_coef,
                entropy_target=entropy_target,
            )
        super().__init__(
            model=model,
            reward=reward,
            optimizer=optimizer,
            lr_schedule=lr_schedule,
            tokenizer=tokenizer,
            clip_low=choices.clip_low,
            clip_high=choices.clip_high,
            dual_clip=choices.dual_clip,
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
            policy_loss=policy_loss,
            policy_loss_args=policy_loss_args,
            rollout_correction=rollout_correction,
            correction_args=correction_args,
            old_log_probs_from=old_log_probs_from,
        )
        self.normalize_std, self.skip_zero_advantages = normalize_std, skip_zero_advantages
        self.overlong_max_tokens, self.overlong_cache_tokens = overlong_max_tokens, overlong_cache_tokens
        self._estimator, self._length_penalty = estimator, penalty

    @property
    @override
    def needs_baselines(self) -> bool:
        return self._estimator.needs_baselines

    @override
    def estimate_advantages(
        self,
        rewards: Tensor,
        uids: list[str],
        lengths: Tensor,
        *,
        baselines: Tensor | None = None,
        components: Tensor | None = None,
    ) -> Tensor:
        return self._estimator(rewards, uids, lengths, baselines=baselines, components=components)

    @override
    def rewards_of_rows(self, data: StepData) -> Tensor:
        """Rewards with the length penalty, less the KL of each response if it is in the reward. Collective."""
        rewards = data.rewards
        if self._length_penalty is not None:
            added = self._length_penalty(data.rewards, data.uids, data.response_lengths)
            self.note_metrics({"reward/length_penalty": float(added.mean())})
            rewards = rewards + added
        penalties = self.kl_penalties(data.experience)
        if penalties is not None:
            over_all = sum_over_rows(data, penalties, self.actor)
            self.note_metrics({"reward/kl_penalty": float(over_all.mean())})
            rewards = rewards - over_all.float()
        return rewards

    @override
    def make_experience(self, rollouts: Rollouts, rewards: Tensor) -> StepData:
        penalties = self._overlong_penalties(rollouts.response_lengths)
        if penalties is None:
            return super().make_experience(rollouts, rewards)
        data = super().make_experience(rollouts, rewards + penalties.to(rewards.device))
        over_all = self._overlong_penalties(data.response_lengths)
        if over_all is not None:
            self.note_metrics({"reward/overlong_penalty": float(over_all.mean())})
        return data

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.skip_zero_advantages:
            check_engine_skips(self.actor)

    @override
    def before_train_batch(self, role: Role, index: int, mini_batch: Experience) -> Experience:
        mini_batch = super().before_train_batch(role, index, mini_batch)
        return rows_with_signal(mini_batch) if self.skip_zero_advantages else mini_batch

    def _overlong_penalties(self, lengths: Tensor) -> Tensor | None:
        if self.overlong_max_tokens is None or self.overlong_cache_tokens is None:
            return None
        return soft_overlong_penalty(lengths, self.overlong_max_tokens, self.overlong_cache_tokens)


def _with_weights(
    advantage: str | AdvantageEstimator, arguments: Mapping[str, Any], reward: RewardFunction
) -> Mapping[str, Any]:
    """``gdpo`` weighs the rewards as their list does, unless told otherwise."""
    if advantage != "gdpo" or not isinstance(reward, WeightedRewards) or "weights" in arguments:
        return arguments
    return {**arguments, "weights": [weight for _, weight in reward.rewards]}
