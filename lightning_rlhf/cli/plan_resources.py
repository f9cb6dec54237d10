"""Memory and traffic of a planned run: the estimates' formulas, given what the configuration says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_rlhf.cli.estimate import (
    Layout,
    ModelShape,
    communication,
    optimizer_state_bytes,
    training_memory,
    value_model,
)
from lightning_rlhf.cli.estimate_megatron import megatron_memory_of_run
from lightning_rlhf.cli.estimate_megatron_traffic import megatron_communication
from lightning_rlhf.cli.estimate_rollout import rollout_memory
from lightning_rlhf.cli.plan_batches import MicroBatches


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a rank of a planned run takes.

    Attributes:
        values: every key with its value or default, as ``validate`` returns them.
        axes: the mesh's sizes by name.
        ranks: data-parallel ones.
        rollouts: of an RL step over all ranks.
        prompt_lengths: tokens of each prompt; None if they are not known.
        processes: of the run.
        max_new_tokens: of a response.
        optimizer_steps: the actor's, in an RL step.
        epochs: passes over the rollouts of an RL step.
        critic_steps: the critic's optimizer steps in an RL step; 0 without one.
        has_adapter: whether the actor trains an adapter.
        notes: gets a line for what is assumed.
    """

    values: Mapping[str, Any]
    axes: Mapping[str, int]
    ranks: int
    processes: int
    rollouts: int
    prompt_lengths: list[int] | None
    max_new_tokens: int
    optimizer_steps: int
    epochs: int
    critic_steps: int
    has_adapter: bool
    notes: list[str]

    @property
    def _layout(self) -> Layout:
        sequence_shards = self.axes.get("sp", 1)
        return Layout(
            shards=self.axes.get("dp_shard", 1) * sequence_shards,
            replicas=self.axes.get("dp_replicate", 1),
            sequence_shards=sequence_shards,
            reshard_after_forward=bool(self.values.get("strategy.reshard_after_forward", True)),
        )

    @property
    def _compute_bytes(self) -> int:
        return 2 if self.values.get("trainer.precision") == "bf16-mixed" else 4

    @property
    def _scores_reference(self) -> bool:
        return bool(self.values.get("algorithm.kl_coef"))

    @property
    def _has_reference(self) -> bool:
        """Whether there is a second model: an adapter's reference is the model without it."""
        return self._scores_reference and not self.has_adapter

    def _state_bytes(self, name: str = "optimizer") -> int:
        if self.values.get(f"algorithm.{name}._target_") is None:
            name = "optimizer"  # a critic without its own has one like the actor's
        path = self.values.get(f"algorithm.{name}._target_") or ""
        momentum = self.values.get(f"algorithm.{name}.momentum") or 0.0
        found = optimizer_state_bytes(str(path), momentum=float(momentum))
        if found is None:
            self.notes.append(f"algorithm.{name}: the state of {path} is counted like Adam's, two moments.")
        return 8 if found is None else found

    def memory(self, shape: ModelShape, micro_batches: MicroBatches | None) -> dict[str, int]:
        """Bytes on a rank at the peak of an update, by what holds them, and their total."""
        parts = self._megatron_memory(shape, micro_batches) if "tp" in self.axes else self._memory(shape, micro_batches)
        parts |= self._rollout_memory(shape)
        return {**parts, "total": sum(parts.values())}

    def _tokens(self, micro_batches: MicroBatches | None) -> int:
        """Of the largest micro-batch; without known lengths the budget is the bound."""
        limit = self.values.get("algorithm.max_tokens_per_micro_batch")
        return micro_batches.tokens if micro_batches else int(limit or 0)

    def _memory(self, shape: ModelShape, micro_batches: MicroBatches | None) -> dict[str, int]:
        tokens = self._tokens(micro_batches)
        parts = training_memory(
            shape,
            layout=self._layout,
            compute_bytes=self._compute_bytes,
            state_bytes=self._state_bytes(),
            tokens=tokens,
            scored_tokens=min(tokens, micro_batches.sequences * self.max_new_tokens) if micro_batches else tokens,
            chunk_size=self.values.get("algorithm.logits_chunk_size") or 512,
            accumulates=micro_batches is None or micro_batches.per_mini_batch > 1,
            gradient_checkpointing=bool(self.values.get("algorithm.gradient_checkpointing")),
            has_reference=self._has_reference,
        )
        if self.critic_steps:
            # at rest; the critic's gradients and activations come and go before the actor's
            critic = value_model(shape)
            parts["critic_parameters"] = 4 * -(-critic.num_parameters // self._layout.shards)
            parts["critic_optimizer_state"] = parts["critic_parameters"] // 4 * self._state_bytes("critic_optimizer")
        return parts

    def _megatron_memory(self, shape: ModelShape, micro_batches: MicroBatches | None) -> dict[str, int]:
        of_run = partial(
            megatron_memory_of_run, self.values, data_parallel=self.ranks, compute_bytes=self._compute_bytes
        )
        tokens = self._tokens(micro_batches)
        parts = of_run(shape, state_bytes=self._state_bytes(), tokens=tokens, has_reference=self._has_reference)
        if self.critic_steps:
            # megatron's buffers of gradients stay; activations come and go before the actor's
            state_bytes = self._state_bytes("critic_optimizer")
            critic = of_run(value_model(shape), state_bytes=state_bytes, tokens=0, has_reference=False)
            at_rest = ("parameters", "gradients", "optimizer_state")
            parts |= {f"critic_{name}": critic[name] for name in at_rest}
        return parts

    def _rollout_memory(self, shape: ModelShape) -> dict[str, int]:
        longest = int(self.values.get("rollout.max_model_len") or self.max_new_tokens)
        if self.prompt_lengths is not None:
            longest = min(longest, max(self.prompt_lengths) + self.max_new_tokens)
        return rollout_memory(
            self.values, shape, longest=longest, rollouts=self.rollouts, processes=self.processes,
            compute_bytes=self._compute_bytes, notes=self.notes,
        )  # fmt: skip

    def communication(
        self,
        shape: ModelShape,
        micro_batches: MicroBatches | None,
        critic_micro_batches: MicroBatches | None,
        *,
        pushes: int,
    ) -> dict[str, int] | None:
        """Bytes that a rank receives in an RL step; None where that rests on lengths that are not known."""
        # old log-probs are scored only where several updates share rollouts, or the reward reads them
        in_reward = self._scores_reference and self.values.get("algorithm.kl_in") == "reward"
        passes = int(self.optimizer_steps > 1 or in_reward) + int(self._scores_reference)
        if "tp" in self.axes:
            return self._megatron_communication(shape, passes=passes, pushes=pushes)
        if micro_batches is None:
            return None
        of_run = partial(communication, layout=self._layout, compute_bytes=self._compute_bytes)
        actor = of_run(
            shape,
            training_micro_batches=micro_batches.per_mini_batch * self.optimizer_steps,
            inference_micro_batches=micro_batches.inference * passes,
            optimizer_steps=self.optimizer_steps,
            pushes=pushes,
        )
        if critic_micro_batches is None:
            return actor
        critic = of_run(
            value_model(shape),
            training_micro_batches=critic_micro_batches.per_mini_batch * self.critic_steps,
            inference_micro_batches=critic_micro_batches.inference,
            optimizer_steps=self.critic_steps,
            pushes=0,
        )
        return {name: size + critic[name] for name, size in actor.items()}

    def _megatron_communication(self, shape: ModelShape, *, passes: int, pushes: int) -> dict[str, int]:
        if self.prompt_lengths is None:
            length: float = int(self.values.get("rollout.max_model_len") or self.max_new_tokens)
        else:
            length = sum(self.prompt_lengths) / len(self.prompt_lengths) + self.max_new_tokens
        self.notes.append(f"megatron_rl: communication is of rollouts of {length:.0f} tokens, with longest responses.")
        tokens = math.ceil(self.rollouts // self.ranks * length)
        of_run = partial(
            megatron_communication, self.values, data_parallel=self.ranks, compute_bytes=self._compute_bytes
        )
        trained = tokens * self.epochs
        actor = of_run(
            shape, trained=trained, inferred=tokens * passes, optimizer_steps=self.optimizer_steps, pushes=pushes
        )
        if not self.critic_steps:
            return actor
        critic = of_run(
            value_model(shape), trained=trained, inferred=tokens, optimizer_steps=self.critic_steps, pushes=0
        )
        return {name: size + critic[name] for name, size in actor.items()}
