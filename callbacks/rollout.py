"""The rollout callback: before each training_step it has an engine sample responses from the current policy."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from lightning_rlhf.batching.checks import check_batch_sizes
from lightning_rlhf.callbacks.dynamic_sampling import DynamicSampling, fill_step, replace_prompts
from lightning_rlhf.callbacks.episodes import episode_sampler, note_episodes
from lightning_rlhf.callbacks.greedy_baseline import add_baselines
from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.callbacks.shared_rollout import generate_in_shares
from lightning_rlhf.callbacks.weight_sync import WeightSync
from lightning_rlhf.contracts.callback import RLCallback
from lightning_rlhf.contracts.environment import EnvironmentFactory
from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.rollout.episodes import TurnLimits
from lightning_rlhf.rollout.multi_turn import MultiTurnSampler
from lightning_rlhf.types import PromptBatch, Rollouts


class RolloutCallback(RLCallback):
    """Fills ``batch.rollouts``; a subclass says which engine samples.

    Args:
        num_rollouts: responses for each prompt (G).
        max_new_tokens: limit on a response's tokens.
        temperature: of sampling; all log-probs are meant at it.
        top_p: nucleus mass kept.
        top_k: candidates kept, 0 keeps all.
        min_p: candidates below this share of the most likely one are dropped.
        stop: strings that end a response.
        stop_token_ids: ids that end a response, beside EOS.
        seed: base seed; every request's own seed is derived from it.
        max_model_len: limit on prompt and response together, in tokens.
        weight_sync: False samples from the starting weights throughout; True asks for a ``WeightSync`` callback.
        dynamic_sampling: leaves groups of equal rewards out of a training step and refills it; None takes every group.
        environment: makes the environment of each episode, a class or ``functools.partial`` of one; rollouts then have
            several turns, of ``max_new_tokens`` each. None: one response to each prompt.
        turn_limits: that bound an episode; None: those of ``TurnLimits``.
    """

    def __init__(
        self,
        *,
        num_rollouts: int = 8,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int = 0,
        max_model_len: int = 2048,
        weight_sync: bool = True,
        dynamic_sampling: DynamicSampling | None = None,
        environment: EnvironmentFactory | None = None,
        turn_limits: TurnLimits | None = None,
    ) -> None:
        if temperature == 0:
            raise ValueError(
                "temperature=0 samples the same response again and again, so a group has nothing to compare. Use a "
                "positive temperature; validation is greedy by itself."
            )
        if max_new_tokens >= max_model_len:
            raise ValueError(
                f"max_model_len={max_model_len} counts prompt and response together, and max_new_tokens="
                f"{max_new_tokens} leaves no token for a prompt. Raise max_model_len or lower max_new_tokens."
            )
        if dynamic_sampling is not None and num_rollouts < 2:
            raise ValueError(
                f"dynamic_sampling compares the rewards of a prompt's rollouts, but num_rollouts={num_rollouts}."
            )
        if turn_limits is not None and environment is None:
            raise ValueError("turn_limits= bound the episodes of an environment, but there is no environment=.")
        if environment is not None and not callable(environment):
            raise TypeError(
                f"environment= makes the environment of each episode: a class or functools.partial of one, not an "
                f"object that all would share; got one of {type(environment).__name__}."
            )
        self.sampling = SamplingConfig(
            n=num_rollouts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=stop if isinstance(stop, str) else tuple(stop),  # one text is refused, not taken apart
            stop_token_ids=stop_token_ids if isinstance(stop_token_ids, int | str) else tuple(stop_token_ids),
            seed=seed,
        )
        self.eval_sampling = dataclasses.replace(self.sampling, n=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        self.max_model_len = max_model_len
        self.weight_sync = weight_sync
        self.dynamic_sampling = dynamic_sampling
        self.environment = environment
        self.turn_limits = turn_limits or TurnLimits()
        self._episodes: MultiTurnSampler | None = None
        self.engine: RolloutEngine | None = None
        self._engine_model: str | Path | nn.Module | None = None
        self._model_directory: TemporaryDirectory[str] | None = None
        self._sync: WeightSync | None = None

    @abstractmethod
    def build_engine(self, trainer: pl.Trainer, model_directory: str | Path) -> RolloutEngine:
        """Builds the engine; called on every rank, once, after the strategy has started the processes."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        as_on_policy(pl_module, callback=self)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        rollouts = [c for c in callbacks if isinstance(c, RolloutCallback)]
        syncs = [c for c in callbacks if isinstance(c, WeightSync)]
        if len(rollouts) != 1 or len(syncs) > 1:
            raise ValueError(
                f"Trainer needs one rollout callback and at most one WeightSync, got "
                f"{[type(c).__name__ for c in (*rollouts, *syncs)]}."
            )
        if self.weight_sync and not syncs:
            raise ValueError(
                f"{type(self).__name__} has no WeightSync beside it: it would always sample from the starting weights. "
                f"Add rl.WeightSync() to Trainer(callbacks=...), or say {type(self).__name__}(weight_sync=False)."
            )
        if syncs and not self.weight_sync:
            raise ValueError(
                f"{type(self).__name__}(weight_sync=False) samples from the starting weights throughout, and the "
                f"WeightSync beside it would push others: leave one of the two out."
            )
        self._sync = syncs[0] if syncs else None
        if self._sync is not None and self._sync.checkpoint_engine.remote and self.in_this_process:
            raise ValueError(
                f"{type(self._sync.checkpoint_engine).__name__} carries weights to other processes, but "
                f"{type(self).__name__} samples in this one: use WeightSync(engine='naive'), or "
                f"VLLMRollout(mode='server')."
            )

    @property
    def in_this_process(self) -> bool:
        """Whether the engine is in the training process, where weights are handed over."""
        return True

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module, datamodule = as_on_policy(pl_module, callback=self), trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(datamodule, PromptDataModule):
            check_batch_sizes(
                prompts_per_step=datamodule.prompts_per_step,
                rollouts_per_prompt=self.sampling.n,
                data_parallel_size=module.actor.data_parallel_size,
                micro_batch_size=module.actor_config.micro_batch_size,
                max_tokens_per_micro_batch=module.actor_config.max_tokens_per_micro_batch,
                **module.mini_batch_sizes,
            )
        elif self.dynamic_sampling is not None:
            raise TypeError(
                f"dynamic_sampling draws further prompts from a PromptDataModule, but the Trainer's data module is "
                f"{type(datamodule).__name__}. Use rl.PromptDataModule, or leave dynamic_sampling out."
            )
        self._ensure_engine(trainer, module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        module = as_on_policy(pl_module, callback=self)
        if not module.finished:
            self._fill(trainer, module, batch, self.sampling, dynamic=self.dynamic_sampling)

    @override
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._fill(trainer, as_on_policy(pl_module, callback=self), batch, self.eval_sampling)

    @override
    def on_test_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._fill(trainer, as_on_policy(pl_module, callback=self), batch, self.eval_sampling)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self.weight_sync:
            raise ValueError(
                f"{type(self).__name__}(weight_sync=False) samples from the weights that the run started with, which "
                f"no checkpoint holds: it cannot go on from one."
            )

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.shutdown()

    def _fill(
        self,
        trainer: pl.Trainer,
        module: OnPolicyModule,
        batch: PromptBatch,
        sampling: SamplingConfig,
        *,
        dynamic: DynamicSampling | None = None,
    ) -> None:
        if not isinstance(batch, PromptBatch):
            raise TypeError(
                f"{type(self).__name__} samples responses to a PromptBatch, but the data loader gave "
                f"{type(batch).__name__}. Use rl.PromptDataModule(source, prompts_per_step=...) in Trainer.fit."
            )
        if batch.rollouts is not None:
            raise RuntimeError(
                "The batch holds rollouts already, of an earlier step: PromptBatch.to() must give a batch without them."
            )
        engine = self._ensure_engine(trainer, module)
        if self._sync is not None:
            self._sync.ensure_fresh(module, engine)

        episodes = self._episodes

        def generate(share: PromptBatch, how: SamplingConfig) -> Rollouts:
            if episodes is None:
                return engine.generate(share, how, rl_step=module.rl_step)
            return episodes.generate(engine, share, how, rl_step=module.rl_step)

        def sample(prompts: PromptBatch, how: SamplingConfig = sampling) -> Rollouts:
            return generate_in_shares(
                prompts,
                lambda share: generate(share, how),
                module.score,
                group=module.actor.model_parallel_group,
                device=module.actor.device,
                session=engine.session,
            )

        with module.timed("rollout"):
            if dynamic is None:
                batch.rollouts = sample(batch)
            else:
                self._fill_with_signal(trainer, module, batch, sample, dynamic, engine.stand_by)
            if episodes is not None:
                note_episodes(episodes.take_counts(), module)
            if sampling is self.sampling and module.needs_baselines:
                add_baselines(
                    batch, lambda prompts: sample(prompts, self.eval_sampling), module.score, stand_by=engine.stand_by
                )
                if episodes is not None:
                    episodes.take_counts()  # those of the baselines are no part of the next step's

    def _fill_with_signal(
        self,
        trainer: pl.Trainer,
        module: OnPolicyModule,
        batch: PromptBatch,
        sample: Callable[[PromptBatch], Rollouts],
        settings: DynamicSampling,
        stand_by: Callable[[], None],
    ) -> None:
        """Puts scored groups with a signal into the batch, whose prompts become theirs. Collective."""

        def scored(prompts: PromptBatch) -> Rollouts:
            rollouts = sample(prompts)
            module.score(rollouts)
            return rollouts

        step = fill_step(
            batch,
            settings=settings,
            mask_truncated=module.mask_truncated,
            sample=scored,
            draw=trainer.datamodule.draw,  # type: ignore[attr-defined]
            group=module.actor.data_parallel_group,
            num_replicas=module.actor.data_parallel_size,
            device=module.actor.device,
            stand_by=stand_by,
        )
        replace_prompts(batch, step.prompts)
        batch.rollouts = step.rollouts
        module.note_metrics(step.metrics)

    def _ensure_engine(self, trainer: pl.Trainer, module: OnPolicyModule) -> RolloutEngine:
        if self.engine is not None and self._engine_model is not module.actor_config.model:
            self.shutdown()  # another module's directory and tokenizer
        if self.engine is None:
            self._engine_model = module.actor_config.model
            self.engine = self.build_engine(trainer, self._directory_of(module))
            if self.environment is not None:
                self._episodes = episode_sampler(
                    self.environment,
                    self.turn_limits,
                    trainer=trainer,
                    module=module,
                    max_model_len=self.max_model_len,
                )
            if not self.weight_sync:
                self.engine.load_weights(module.actor.get_per_tensor_param())
                self.engine.weight_version = 0
        return self.engine

    def _directory_of(self, module: OnPolicyModule) -> str | Path:
        """Where the engine finds config and tokenizer; a model given as a module is described in a temporary folder."""
        model = module.actor_config.model
        if not isinstance(model, nn.Module):
            return model
        self._model_directory = TemporaryDirectory(prefix="lightning_rlhf_model_")
        model.config.save_pretrained(self._model_directory.name)  # type: ignore[operator, union-attr]
        module.tokenizer.save_pretrained(self._model_directory.name)
        return self._model_directory.name

    def shutdown(self) -> None:
        """Frees the engine, which outlives ``fit``, ``validate`` and ``test``; a process holds one vLLM at a time."""
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None
        if self._model_directory is not None:
            self._model_directory.cleanup()
            self._model_directory = None


class HFRollout(RolloutCallback):
    """Samples with a Hugging Face model: slow, exact, without vLLM; for tests and small experiments."""

    @override
    def build_engine(self, trainer: pl.Trainer, model_directory: str | Path) -> RolloutEngine:
        from lightning_rlhf.rollout.hf import HFReferenceEngine

        return HFReferenceEngine(
            model_directory,
            dtype=torch.float32,
            max_model_len=self.max_model_len,
            device=trainer.strategy.root_device,
        )
