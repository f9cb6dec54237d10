"""From a composed configuration to the numbers of its run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from lightning_rlhf.batching.checks import check_batch_sizes
from lightning_rlhf.cli.estimate import ModelShape
from lightning_rlhf.cli.estimate_megatron import pipeline_of_run
from lightning_rlhf.cli.layout_checks import mesh_sizes, world_size
from lightning_rlhf.cli.model_shape import read_model_shape, with_adapter
from lightning_rlhf.cli.plan_batches import BatchSizes, MicroBatches, bound_micro_batches
from lightning_rlhf.cli.plan_resources import Resources
from lightning_rlhf.cli.run import build
from lightning_rlhf.cli.targets import ConfigError
from lightning_rlhf.cli.validate import data_parallel_size, validate
from lightning_rlhf.data.datamodule import PromptDataModule
from lightning_rlhf.data.encode import encode_prompts
from lightning_rlhf.data.sampler import check_batch_size


def plan_run(cfg: DictConfig) -> dict[str, Any]:
    """The plan, under headings, ready for JSON; what cannot be known is None and a note says why.

    Reads the configuration, the data, the tokenizer and the model's ``config.json``; loads no weights.

    Args:
        cfg: the composed configuration.

    Raises:
        ConfigError: if the run cannot work, with one line for each reason.
    """
    return _Planner(cfg).plan()


class _Planner:
    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.values = validate(cfg)
        self.notes: list[str] = []
        processes = world_size(self.values)
        ranks = data_parallel_size(self.values)
        if processes is None or ranks is None:
            raise ConfigError("trainer.devices: the plan needs a number; the machine that runs may have another.")
        self.processes, self.ranks = processes, ranks
        self.axes = mesh_sizes(self.values, processes)
        self.group = self._whole("rollout.num_rollouts")
        self.prompts = self._whole("data.prompts_per_step")
        self.max_new_tokens = self._whole("rollout.max_new_tokens")
        self.mini_batch = self.values.get("algorithm.mini_batch_size") or self.prompts * self.group
        self.epochs = self.values.get("algorithm.num_epochs") or 1
        self.num_mini_batches = self.prompts * self.group // self.mini_batch
        self.optimizer_steps = self.num_mini_batches * self.epochs
        self.critic_mini_batch = self._critic_mini_batch()

    def _whole(self, key: str) -> int:
        value = self.values.get(key)
        if not isinstance(value, int):
            raise ConfigError(f"{key}: the plan needs it as a whole number, and it is {value!r}.")
        return value

    def _critic_mini_batch(self) -> int | None:
        """Rollouts of one of the critic's optimizer steps; None for an algorithm without a critic.

        Raises:
            ConfigError: if they do not divide an RL step's rollouts over the ranks.
        """
        if "algorithm.critic_mini_batch_size" not in self.values:
            return None
        size: int = self.values["algorithm.critic_mini_batch_size"] or self.mini_batch
        if self.values.get("algorithm.critic_model") is not None:
            self.notes.append("algorithm.critic_model: the critic is counted with the actor's sizes.")
        try:
            check_batch_sizes(
                prompts_per_step=self.prompts,
                rollouts_per_prompt=self.group,
                data_parallel_size=self.ranks,
                mini_batch_size=size,
            )
        except ValueError as error:
            raise ConfigError(f"algorithm.critic_mini_batch_size: {error}") from error
        return size

    @property
    def _critic_steps(self) -> int:
        return (
            0 if self.critic_mini_batch is None else self.prompts * self.group // self.critic_mini_batch * self.epochs
        )

    def plan(self) -> dict[str, Any]:
        shape = self._shape()
        prompt_lengths = self._prompt_lengths()
        sizes = self._batch_sizes(shape)
        micro_batches = self._micro_batches(prompt_lengths, sizes)
        critic_micro_batches = self._critic_micro_batches(prompt_lengths, sizes)
        pushes = self._weight_pushes()
        resources = self._resources(prompt_lengths)
        critic = {} if self.critic_mini_batch is None else {"critic_optimizer_steps": self._critic_steps}
        # the denominators are over the mini-batch of all ranks, whatever cuts it up
        return {
            "name": str(self.cfg.name),
            "processes": {"world_size": self.processes, "data_parallel_size": self.ranks, "axes": self.axes},
            "rl_step": {
                "prompts": self.prompts,
                "rollouts": self.prompts * self.group,
                "mini_batches": self.num_mini_batches,
                "epochs": self.epochs,
                "optimizer_steps": self.optimizer_steps,
                **critic,
            },
            "per_rank": {
                "prompts": self.prompts // self.ranks,
                "rollouts": self.prompts * self.group // self.ranks,
                "rollouts_per_mini_batch": sizes.share,
                "micro_batches_per_mini_batch": micro_batches.per_mini_batch if micro_batches else None,
                "micro_batches_per_rl_step": (
                    micro_batches.per_mini_batch * self.optimizer_steps if micro_batches else None
                ),
                "tokens_in_the_largest_micro_batch": micro_batches.tokens if micro_batches else None,
            },
            "micro_batches": self._how_they_are_cut(prompt_lengths),
            **self._pipeline(micro_batches),
            "denominators": self._denominators(),
            "run": self._run_length(prompt_lengths),
            "memory_per_rank": None if shape is None else resources.memory(shape, micro_batches),
            "communication_per_rl_step": (
                None
                if shape is None
                else resources.communication(shape, micro_batches, critic_micro_batches, pushes=pushes["per_rl_step"])
            ),
            "weight_pushes": pushes,
            "notes": self.notes,
        }

    def _resources(self, prompt_lengths: list[int] | None) -> Resources:
        return Resources(
            values=self.values,
            axes=self.axes,
            ranks=self.ranks,
            processes=self.processes,
            rollouts=self.prompts * self.group,
            prompt_lengths=prompt_lengths,
            max_new_tokens=self.max_new_tokens,
            optimizer_steps=self.optimizer_steps,
            epochs=self.epochs,
            critic_steps=self._critic_steps,
            has_adapter=self.cfg.algorithm.get("lora") is not None,
            notes=self.notes,
        )

    def _shape(self) -> ModelShape | None:
        try:
            shape = read_model_shape(str(self.cfg.model.path))
        except ValueError as error:
            self.notes.append(f"Memory and communication are not estimated: {error}")
            return None
        try:
            return with_adapter(shape, str(self.cfg.model.path), build("algorithm.lora", self.cfg))
        except (ValueError, ImportError) as error:
            raise ConfigError(f"algorithm.lora: {error}") from error

    # --- batches ------------------------------------------------------------------------------------------------

    def _batch_sizes(self, shape: ModelShape | None) -> BatchSizes:
        return BatchSizes(
            prompts_per_step=self.prompts,
            group_size=self.group,
            mini_batch_size=self.mini_batch,
            data_parallel_size=self.ranks,
            micro_batch_size=self.values.get("algorithm.micro_batch_size"),
            max_tokens=self.values.get("algorithm.max_tokens_per_micro_batch"),
            max_new_tokens=self.max_new_tokens,
            hidden_size=shape.hidden_size if shape else 2048,
            seed=self.values.get("algorithm.seed") or 0,
            share_prompts=bool(self.values.get("strategy.share_prompts")),
        )

    def _prompt_lengths(self) -> list[int] | None:
        """Tokens of each prompt; None, with a note, if data or tokenizer cannot be had here."""
        from transformers import AutoTokenizer

        data = build("data", self.cfg)
        if not isinstance(data, PromptDataModule):
            self.notes.append(
                f"data: {type(data).__name__} is not a PromptDataModule, so prompts have no known length."
            )
            return None
        tokenizer = data.tokenizer or self.values.get("algorithm.tokenizer") or str(self.cfg.model.path)
        try:
            if isinstance(tokenizer, str):
                tokenizer = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
            prompts = data.source.load()
        except (OSError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            self.notes.append(f"Prompts have no known length, so dynamic micro-batches are not counted: {reason}")
            return None
        try:
            encoded, report = encode_prompts(
                tokenizer,
                prompts,
                max_prompt_tokens=data.max_prompt_tokens,
                overlong=data.overlong,
                chat_template_kwargs=data.chat_template_kwargs,
            )
            check_batch_size(len(encoded), prompts_per_step=self.prompts, num_replicas=self.ranks)
        except ValueError as error:
            raise ConfigError(f"data: {error}") from error
        if report.dropped or report.truncated:
            self.notes.append(f"data: {len(report.dropped)} prompts are dropped, {len(report.truncated)} truncated.")
        return [len(prompt.token_ids) for prompt in encoded]

    def _critic_micro_batches(self, prompt_lengths: list[int] | None, sizes: BatchSizes) -> MicroBatches | None:
        if self.critic_mini_batch is None or prompt_lengths is None:
            return None
        return bound_micro_batches(prompt_lengths, replace(sizes, mini_batch_size=self.critic_mini_batch))

    def _micro_batches(self, prompt_lengths: list[int] | None, sizes: BatchSizes) -> MicroBatches | None:
        if prompt_lengths is not None:
            longest = max(prompt_lengths) + self.max_new_tokens
            if sizes.max_tokens is not None and longest > sizes.max_tokens:
                self.notes.append(
                    f"algorithm.max_tokens_per_micro_batch={sizes.max_tokens} is below {longest}, the longest prompt "
                    f"({max(prompt_lengths)} tokens) and max_new_tokens={self.max_new_tokens}: a response that uses "
                    f"them up stops the run."
                )
            try:
                return bound_micro_batches(prompt_lengths, sizes)
            except ValueError as error:
                raise ConfigError(f"algorithm: {error}") from error
        if sizes.max_tokens is not None:
            return None
        rows = sizes.micro_batch_size or sizes.share
        limit = int(self.values.get("rollout.max_model_len") or self.max_new_tokens)
        return MicroBatches(
            per_mini_batch=-(-sizes.share // rows),
            inference=-(-self.num_mini_batches * sizes.share // (sizes.micro_batch_size or sizes.share)),
            tokens=rows * limit,
            sequences=rows,
        )

    def _how_they_are_cut(self, prompt_lengths: list[int] | None) -> dict[str, Any]:
        count = self.values.get("algorithm.micro_batch_size")
        tokens = self.values.get("algorithm.max_tokens_per_micro_batch")
        cut = "by tokens (dynamic)" if tokens else "by count (static)" if count else "not cut"
        found: dict[str, Any] = {"cut": cut, "limit": tokens or count or "the rank's share of a mini-batch"}
        if prompt_lengths is not None:
            found["prompt_tokens_longest"] = max(prompt_lengths)
            found["prompt_tokens_mean"] = round(sum(prompt_lengths) / len(prompt_lengths), 1)
        found["response_tokens_at_most"] = self.max_new_tokens
        return found

    def _pipeline(self, micro_batches: MicroBatches | None) -> dict[str, Any]:
        if "pp" not in self.axes:
            return {}
        return {"pipeline": pipeline_of_run(self.values, micro_batches.per_mini_batch if micro_batches else None)}

    def _denominators(self) -> dict[str, Any]:
        mode = self.values.get("algorithm.aggregation")
        found: dict[str, Any] = {"aggregation": mode, "sequences": self.mini_batch}
        found["response_tokens_at_most"] = self.mini_batch * self.max_new_tokens
        if self.values.get("algorithm.norm_length") is not None:
            found["norm_length"] = self.values["algorithm.norm_length"]
        return found

    def _run_length(self, prompt_lengths: list[int] | None) -> dict[str, Any]:
        limits = [self.values.get("algorithm.max_rl_steps")]
        epochs = self.values.get("trainer.max_epochs")
        per_epoch = None if prompt_lengths is None else len(prompt_lengths) // self.prompts
        limit = self.values.get("trainer.limit_train_batches")
        if isinstance(limit, int) and not isinstance(limit, bool):
            per_epoch = limit if per_epoch is None else min(per_epoch, limit)
        if per_epoch is not None and isinstance(epochs, int) and epochs > 0:
            limits.append(per_epoch * epochs)
        known = [int(limit) for limit in limits if isinstance(limit, int)]
        steps = min(known) if known else None
        return {
            "prompts_in_the_data": None if prompt_lengths is None else len(prompt_lengths),
            "rl_steps": steps,
            "optimizer_steps": None if steps is None else steps * self.optimizer_steps,
            "rollouts": None if steps is None else steps * self.prompts * self.group,
        }

    def _weight_pushes(self) -> dict[str, int]:
        every = self.values.get("weight_sync.every")
        pushed = 0 if every is None else self.optimizer_steps if every == "optimizer_step" else 1
        unread = max(pushed - 1, 0)
        if unread:
            self.notes.append(
                f"weight_sync: of {pushed} pushes in an RL step {unread} are overwritten before anything is sampled; "
                f"weight_sync.every=rollout leaves them out."
            )
        return {"per_rl_step": pushed, "that_nobody_reads": unread}
