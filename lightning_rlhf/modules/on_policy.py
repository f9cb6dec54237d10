"""The straight line: rollouts, rewards, experience, update. What every on-policy algorithm shares."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.algorithms.aggregation import AggregationMode
from lightning_rlhf.contracts.callback import RNG_STATE_KEY
from lightning_rlhf.contracts.engine import (
    BaseEngine,
    EngineConfig,
    LRScheduleFactory,
    OptimizerFactory,
)
from lightning_rlhf.modules.arguments import check_arguments
from lightning_rlhf.modules.reference import ReferenceOwner
from lightning_rlhf.modules.step_data import StepData, build_step_data
from lightning_rlhf.modules.step_metrics import component_rewards, experience_metrics, rollout_metrics
from lightning_rlhf.rewards import RewardFunction, score
from lightning_rlhf.rng import capture_rng, restore_rng
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs, PromptBatch, Rollouts

COUNTERS_KEY = "lightning_rlhf"


class OnPolicyModule(ReferenceOwner):
    """A LightningModule whose training_step is one RL step; GRPO and PPO derive from it.

    A subclass gives the advantage estimator and the policy loss. Optimization is manual: one ``training_step`` takes
    one optimizer step per mini-batch and epoch, through the strategy's engine.

    Args:
        model: a Hugging Face directory or id, or a causal-LM module.
        reward: a callable ``(prompts, responses, metadata) -> rewards``, or several with weights
            (``rewards.WeightedRewards``).
        optimizer: builds the optimizer from the parameters and holds the learning rate, for example
            ``functools.partial(torch.optim.AdamW, lr=1e-6)``.
        lr_schedule: builds a learning-rate schedule from the optimizer; stepped once per optimizer step.
        tokenizer: a tokenizer or its directory; None loads the model's.
        aggregation: how per-token terms become one loss, see ``algorithms.aggregation``.
        norm_length: tokens; the constant of ``seq-mean-token-sum-norm`` (Dr.GRPO).
        num_epochs: passes over the rollouts of one RL step.
        mini_batch_size: rollouts in one optimizer step, over all ranks; None takes all of an RL step.
        micro_batch_size: sequences in one forward-backward on one rank.
        max_tokens_per_micro_batch: tokens in one forward-backward on one rank; excludes ``micro_batch_size``.
        max_grad_norm: global gradient norm above which gradients are scaled down; None never.
        gradient_checkpointing: recompute activations in the backward.
        logits_chunk_size: tokens whose logits are held at a time.
        share_prompts: compute what rollouts of a prompt begin with once, see ``EngineConfig``.
        lora: trains an adapter in place of the parameters, see ``EngineConfig.lora``.
        mask_truncated: leave responses that hit the length limit out of the loss and its denominators.
        max_rl_steps: RL steps after which training ends; None leaves it to the Trainer.
        seed: draws the mini-batches.

    Attributes:
        last_metrics: of the last RL step, by name.
        step_data: what the last RL step trained on, until callbacks' ``on_train_batch_end`` have seen it.
    """

    def __init__(
        self,
        *,
        model: str | Path | nn.Module,
        reward: RewardFunction,
        optimizer: OptimizerFactory,
        lr_schedule: LRScheduleFactory | None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None,
        aggregation: AggregationMode,
        norm_length: int | None,
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
    ) -> None:
        super().__init__()
        check_arguments(
            aggregation=aggregation,
            norm_length=norm_length,
            num_epochs=num_epochs,
            mini_batch_size=mini_batch_size,
            max_rl_steps=max_rl_steps,
            seed=seed,
        )
        self.actor_config = EngineConfig(
            role="actor",
            model=model,
            optimizer=optimizer,
            lr_schedule=lr_schedule,
            max_grad_norm=max_grad_norm,
            micro_batch_size=micro_batch_size,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            gradient_checkpointing=gradient_checkpointing,
            logits_chunk_size=logits_chunk_size,
            share_prompts=share_prompts,
            lora=lora,
        )
        self.reward = reward
        self.aggregation: AggregationMode = aggregation
        self.norm_length = norm_length
        self.num_epochs = num_epochs
        self.mini_batch_size = mini_batch_size
        self.mask_truncated = mask_truncated
        self.max_rl_steps = max_rl_steps
        self.seed = seed
        self.last_metrics: dict[str, float] = {}
        self.step_data: StepData | None = None
        self._tokenizer = tokenizer
        self._rng_to_restore: dict[str, Any] | None = None

    # --- what an algorithm is -----------------------------------------------------------------------------------

    def estimate_advantages(
        self,
        rewards: Tensor,
        uids: list[str],
        lengths: Tensor,
        *,
        baselines: Tensor | None = None,
        components: Tensor | None = None,
    ) -> Tensor:
        """Advantages ``[B]`` of all ranks' rows.

        An algorithm whose advantages differ from token to token overrides ``add_advantages`` instead.

        Args:
            rewards: ``[B]``, NaN where a row does not train.
            uids: ``B`` identities of the prompts.
            lengths: ``[B]`` response tokens.
            baselines: ``[B]`` rewards of the prompts' greedy rollouts.
            components: ``[B, K]``, a column for each of several rewards.
        """
        raise NotImplementedError(f"{type(self).__name__} must define estimate_advantages or add_advantages.")

    def add_advantages(self, data: StepData) -> StepData:
        """Fills in ``experience.advantages``; here each token gets its rollout's. Collective."""
        experience = data.experience
        over_all = self.estimate_advantages(
            self.rewards_of_rows(data),
            data.uids,
            data.response_lengths,
            baselines=data.baselines,
            components=data.components,
        )
        per_row = data.own_rows(over_all)
        advantages = per_row[experience.sequence_ids] * experience.loss_mask
        return dataclasses.replace(data, experience=dataclasses.replace(experience, advantages=advantages))

    def rewards_of_rows(self, data: StepData) -> Tensor:
        """``[B]`` of all ranks' rows, which advantages are estimated from; NaN: does not train. Collective."""
        return data.rewards

    @abstractmethod
    def policy_loss(self, outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
        """The loss as per-token terms; see ``contracts.engine.BaseEngine.forward_backward_batch``."""

    @property
    def uses_reference(self) -> bool:
        """Whether log-probs of a frozen reference are read."""
        return False

    @property
    def reference_moves(self) -> bool:
        """Whether the reference changes over the run, so that checkpoints hold it."""
        return False

    @property
    def uses_old_log_probs(self) -> bool:
        """Whether the log-probs before the update are read for more than the ratio of a later update."""
        return False

    @property
    def needs_baselines(self) -> bool:
        """Whether the rollout callback samples a greedy rollout of each prompt and scores it as a baseline."""
        return False

    @property
    def mini_batch_sizes(self) -> dict[str, int | None]:
        """Rollouts in one optimizer step of each trained engine, by the argument's name."""
        return {"mini_batch_size": self.mini_batch_size}

    @property
    def old_log_probs_are_rollouts(self) -> bool:
        """Whether the rollout engine's log-probs stand in for the trainer's before the update."""
        return False

    @property
    def plan_mini_batch_size(self) -> int | None:
        """Rollouts in a mini-batch of the plan, of which every engine's mini-batches are made up."""
        return self.mini_batch_size

    # --- one RL step --------------------------------------------------------------------------------------------

    @override
    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        rollouts = self._rollouts_of(batch)
        rewards = self.score(rollouts)
        step_data = self.step_data = self.make_experience(rollouts, rewards)
        before_update = (
            rollout_metrics(step_data.plan),
            component_rewards(rollouts, self.actor),
            experience_metrics(rollouts, step_data.experience, self.actor, policy_version=self.policy_version),
        )
        self.finish_step(*before_update, self.update(step_data))

    def score(self, rollouts: Rollouts) -> Tensor:
        """Rewards ``[B]`` fp32 of this rank's rows, NaN where one failed; kept in ``rollouts.rewards``.

        Rows that the rollout callback has scored already keep their rewards.
        """
        if rollouts.rewards is None:
            with self.timed("reward"):
                scores = score(self.reward, rollouts.prompts, rollouts.responses, rollouts.metadata)
            for message in scores.errors:
                rank_zero_warn(f"A reward failed and its row does not train: {message}")
            rollouts.rewards = scores.rewards
            if len(scores.components) > 1:
                named = {name: values.tolist() for name, values in scores.components.items()}
                rows = range(len(rollouts))
                rollouts.reward_components = [{name: named[name][row] for name in named} for row in rows]
        return rollouts.rewards

    def make_experience(self, rollouts: Rollouts, rewards: Tensor) -> StepData:
        """One global plan, the other policies' log-probs, and advantages. Collective."""
        with self.timed("experience"):
            data = build_step_data(
                rollouts,
                rewards,
                engine=self.actor,
                aggregation=self.aggregation,
                norm_length=self.norm_length,
                mask_truncated=self.mask_truncated,
                mini_batch_size=self.plan_mini_batch_size,
                # mixed, not added: the steps of one seed must not repeat those of the next
                seed=int(np.random.SeedSequence([self.seed, self.rl_step]).generate_state(1)[0]),
            )
        experience = data.experience
        num_updates = self.num_epochs * len(data.in_mini_batches(self.mini_batch_size).plan.mini_batches)
        if self.old_log_probs_are_rollouts:
            experience = dataclasses.replace(experience, old_log_probs=experience.rollout_log_probs)
        elif num_updates > 1 or self.uses_old_log_probs:
            with self.timed("old_log_probs"):
                old = self.actor.infer_batch(experience)
            experience = dataclasses.replace(experience, old_log_probs=old.log_probs, routed_experts=old.routed_experts)
        # else the one update starts from the weights that old log-probs would be computed with: the ratio's
        # denominator is its own numerator, detached, and a second forward would give the same numbers
        experience = dataclasses.replace(experience, ref_log_probs=self.reference_log_probs(experience))
        with self.timed("experience"):
            return self.add_advantages(dataclasses.replace(data, experience=experience))

    def update(self, data: StepData) -> dict[str, float]:
        """Trains the actor on the experience; returns its metrics. Collective."""
        with self.timed("update"):
            return self.train_engine(
                "actor", data.in_mini_batches(self.mini_batch_size), self.policy_loss, epochs=self.num_epochs
            )

    def finish_step(self, *parts: Mapping[str, float]) -> None:
        """Counts the RL step, and hands its metrics to callbacks and loggers."""
        self.rl_step += 1
        counters = {"rl_step": float(self.rl_step), "policy_version": float(self.policy_version)}
        every_part = (*parts, *self.take_record(), counters)
        self.last_metrics = {name: value for part in every_part for name, value in part.items()}
        self.log_dict(self.last_metrics, logger=False, batch_size=1)
        for logger in self.trainer.loggers:
            logger.log_metrics(self.last_metrics, step=self.rl_step)
        if self.finished:
            self.trainer.should_stop = True

    @property
    def finished(self) -> bool:
        """Whether ``max_rl_steps`` are done."""
        return self.max_rl_steps is not None and self.rl_step >= self.max_rl_steps

    @override
    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: PromptBatch, stage: str) -> None:
        rewards = self.score(self._rollouts_of(batch))
        observed = rewards[~rewards.isnan()]
        # on every rank, also on one whose rewards all failed: logging is collective
        mean = observed.mean() if observed.numel() else torch.tensor(0.0)
        self.log(f"{stage}/reward", mean, batch_size=observed.numel(), sync_dist=True)
        failed = float(rewards.numel() - observed.numel())
        self.log(f"{stage}/failed", failed, batch_size=1, sync_dist=True, reduce_fx="sum")

    def _rollouts_of(self, batch: PromptBatch) -> Rollouts:
        if batch.rollouts is None:
            raise RuntimeError(
                "The batch holds no rollouts. Add a rollout callback to the Trainer, for example "
                "Trainer(callbacks=[rl.VLLMRollout(), rl.WeightSync()])."
            )
        return batch.rollouts

    # --- engines ------------------------------------------------------------------------------------------------

    @property
    def actor(self) -> BaseEngine:
        """The trained policy's engine."""
        if "actor" not in self._engines:
            raise RuntimeError("The actor's engine exists only once Trainer.fit, validate or test has begun.")
        return self._engines["actor"]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded on first use."""
        if self._tokenizer is None and isinstance(self.actor_config.model, nn.Module):
            raise ValueError("model= is a module, so tokenizer= must be given too.")
        if not isinstance(self._tokenizer, PreTrainedTokenizerBase):
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(str(self._tokenizer or self.actor_config.model))
        return self._tokenizer

    @override
    def configure_model(self) -> None:
        if self.has_engines():
            self.check_reference_engine()
            return
        if self.uses_reference:
            self.add_reference(self.actor_config, moves=self.reference_moves)
        self.add_trained_engine("language_model", self.actor_config)

    # --- Trainer hooks ------------------------------------------------------------------------------------------

    @override
    def on_fit_start(self) -> None:
        if self.trainer.max_steps != -1:
            rank_zero_info(
                f"Trainer(max_steps={self.trainer.max_steps}) counts optimizer steps of all models; it takes effect at "
                f"the next RL step's end. To count RL steps use max_rl_steps."
            )

    @override
    def on_validation_end(self) -> None:
        self.take_record()  # what a validation took is no part of the next RL step

    @override
    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> int | None:
        if self._rng_to_restore is not None:
            restore_rng(self._rng_to_restore)
            self._rng_to_restore = None
        if self.finished:  # a run that was complete when its checkpoint was written
            self.trainer.should_stop = True
            return -1
        return None

    @override
    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        self.step_data = None  # callbacks have seen it; the next rollout may need the memory

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[COUNTERS_KEY] = {"rl_step": self.rl_step, "policy_version": self.policy_version}
        checkpoint[RNG_STATE_KEY] = capture_rng()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if COUNTERS_KEY not in checkpoint:
            raise ValueError(
                f"The checkpoint has no {COUNTERS_KEY!r} entry, so it was not saved by {type(self).__name__}. To start "
                "from a pretrained model pass its directory as model=."
            )
        self.rl_step = checkpoint[COUNTERS_KEY]["rl_step"]
        self.policy_version = checkpoint[COUNTERS_KEY]["policy_version"]
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._rng_to_restore = checkpoint.get(RNG_STATE_KEY)
