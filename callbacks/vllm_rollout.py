"""The rollout callback for vLLM, inside the training processes or in replicas of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from lightning_rlhf.callbacks.async_rollout import WINDOW_KEY, AsyncRollout, AsyncSettings, check_same_kind
from lightning_rlhf.callbacks.dynamic_sampling import DynamicSampling
from lightning_rlhf.callbacks.greedy_baseline import add_baselines
from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.callbacks.rollout import RolloutCallback
from lightning_rlhf.callbacks.served_rollout import ServerSettings, build_served_engine
from lightning_rlhf.callbacks.vllm_layout import check_vllm_layout
from lightning_rlhf.contracts.environment import EnvironmentFactory
from lightning_rlhf.contracts.rollout import Guide, RolloutEngine
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.rollout.episodes import TurnLimits
from lightning_rlhf.types import PromptBatch, Rollouts


class VLLMRollout(RolloutCallback):
    """Samples with vLLM: one engine inside each training process, or replicas in processes of their own.

    Colocated engines of neighbouring training processes can share one model (``tensor_parallel_size``). Whatever the
    strategy makes of these processes, they then sample all their prompts together, and each gets its own back.

    Args:
        mode: ``"colocated"``, in each training process, or ``"server"``: replicas, which the first rank starts.
        replicas: with ``"server"``, how many.
        tensor_parallel_size: devices that share one replica's model; colocated, training processes of one node.
        devices: CUDA devices of each replica, one list for each.
        urls: replicas that run already, instead of starting some.
        token: that those ask for.
        in_flight: what new weights do to responses under way: ``"keep"`` or ``"resubmit"``.
        max_staleness: policy versions that a group may be older than the step that trains on it; 0 is synchronous.
        over_sampling: groups under way for each that a step takes; the step goes on with those that finish first.
        server: more of ``ServerSettings``, by name.
        guide: a form that every response (with an environment every turn) has: ``rl.Guide(regex=...)``,
            ``rl.Guide(json_schema=...)`` or ``rl.Guide(choice=[...])``. What it rules out is not sampled, and counts as
            impossible in the rollout's log-probs but not in the trainer's.
        dtype: of vLLM's weights, ``"float32"`` or ``"bfloat16"``; None follows ``Trainer(precision=)``.
        max_num_seqs: responses sampled side by side.
        kv_cache_bytes: memory of the key-value cache.
        engine_kwargs: more of vLLM's ``EngineArgs``; it refuses unknown ones.
        **rollout: see ``RolloutCallback``.
    """

    def __init__(
        self,
        *,
        mode: Literal["colocated", "server"] = "colocated",
        replicas: int = 1,
        tensor_parallel_size: int = 1,
        devices: Sequence[Sequence[int]] | None = None,
        urls: Sequence[str] = (),
        token: str | None = None,
        in_flight: Literal["keep", "resubmit"] = "keep",
        max_staleness: int = 0,
        over_sampling: float = 1.0,
        server: dict[str, Any] | None = None,
        guide: Guide | None = None,
        dtype: str | None = None,
        max_num_seqs: int = 64,
        kv_cache_bytes: int = 512 * 2**20,
        engine_kwargs: dict[str, Any] | None = None,
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
        super().__init__(
            num_rollouts=num_rollouts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=stop,
            stop_token_ids=stop_token_ids,
            seed=seed,
            max_model_len=max_model_len,
            weight_sync=weight_sync,
            dynamic_sampling=dynamic_sampling,
            environment=environment,
            turn_limits=turn_limits,
        )
        self.sampling = dataclasses.replace(self.sampling, guide=guide)
        self.eval_sampling = dataclasses.replace(self.eval_sampling, guide=guide)
        if mode not in ("colocated", "server"):
            raise ValueError(f"VLLMRollout(mode={mode!r}): expected 'colocated' or 'server'.")
        if dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"VLLMRollout(dtype={dtype!r}): vLLM's weights are 'float32' or 'bfloat16' here.")
        if max_num_seqs < 1 or kv_cache_bytes < 1:
            raise ValueError(f"max_num_seqs={max_num_seqs} and kv_cache_bytes={kv_cache_bytes} must be at least 1.")
        self.server = ServerSettings(
            replicas=replicas,
            tensor_parallel_size=tensor_parallel_size,
            devices=devices,
            urls=urls if isinstance(urls, str) else tuple(urls),  # one text is refused, not taken apart
            token=token,
            in_flight=in_flight,
            **(server or {}),
        )
        self.ahead = AsyncSettings(max_staleness=max_staleness, over_sampling=over_sampling)
        colocated = ServerSettings(tensor_parallel_size=tensor_parallel_size)
        if mode == "colocated" and (self.server != colocated or self.ahead.needs_window):
            raise ValueError(
                "replicas=, devices=, urls=, token=, in_flight=, max_staleness=, over_sampling= and server= are about "
                "VLLMRollout(mode='server'); a colocated engine runs in each training process, on its device, and "
                "neither samples beside training nor stops between two tokens."
            )
        if twice := sorted({"tensor_parallel_size", "distributed_executor_backend"} & set(engine_kwargs or {})):
            raise ValueError(f"engine_kwargs may not hold {twice}: VLLMRollout(tensor_parallel_size=) decides it.")
        self._async: AsyncRollout | None = None
        self._restored: list[dict[str, Any]] | None = None
        self.mode = mode
        self.dtype = dtype
        self.max_num_seqs = max_num_seqs
        self.kv_cache_bytes = kv_cache_bytes
        self.engine_kwargs = dict(engine_kwargs or {})

    @property
    @override
    def in_this_process(self) -> bool:
        return self.mode == "colocated"

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._sync is not None and self._sync.overlap and not self.ahead.max_staleness:
            raise ValueError(
                "WeightSync(overlap=True) gains nothing where every rollout needs the newest weights: let rollouts run "
                "ahead (VLLMRollout(max_staleness=1)), or leave overlap out."
            )
        if self.mode == "colocated" and self.server.tensor_parallel_size > 1:
            check_vllm_layout(
                self.server.tensor_parallel_size,
                num_nodes=trainer.num_nodes,
                processes_per_node=trainer.num_devices,
                model=as_on_policy(pl_module, callback=self).actor_config.model,
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        module = as_on_policy(pl_module, callback=self)
        if not self.ahead.needs_window:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        elif not module.finished:
            self._fill_from_ahead(trainer, module, batch)

    def _fill_from_ahead(self, trainer: pl.Trainer, module: OnPolicyModule, batch: PromptBatch) -> None:
        engine = self._ensure_engine(trainer, module)
        lag = self._sync.lag if self._sync is not None else 0
        if self._sync is not None:
            self._sync.ensure_fresh(module, engine, max_lag=lag, runs_ahead=True)
        if self._async is not None and not self._async.serves(engine, module, trainer):
            self._async.close()  # its groups are of another module's policy, or of other prompts
            self._async = None
        if self._async is None:
            self._async = AsyncRollout(
                self.ahead,
                trainer=trainer,
                module=module,
                engine=engine,  # type: ignore[arg-type] # mode is "server"
                sampling=self.sampling,
                lag=lag,
                restored=self._restored,
                dynamic=self.dynamic_sampling,
                episodes=self._episodes,
            )
            self._restored = None
        with module.timed("rollout"):
            self._async.fill(batch)
            if module.needs_baselines:
                self._add_baselines(module, engine, batch, lag=lag)

    def _add_baselines(self, module: OnPolicyModule, engine: RolloutEngine, batch: PromptBatch, *, lag: int) -> None:
        """Greedy rollouts are waited for, so a push that is under way must end first."""
        if self._sync is not None:
            self._sync.ensure_fresh(module, engine, max_lag=lag)

        def sample(prompts: PromptBatch) -> Rollouts:
            with engine.session():
                if self._episodes is None:
                    return engine.generate(prompts, self.eval_sampling, rl_step=module.rl_step)
                rollouts = self._episodes.generate(engine, prompts, self.eval_sampling, rl_step=module.rl_step)
            self._episodes.take_counts()  # those of the baselines are no part of the next step's
            return rollouts

        add_baselines(batch, sample, module.score, stand_by=engine.stand_by)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._async is not None:
            checkpoint[WINDOW_KEY] = self._async.to_json()
        elif self._restored is not None:  # no step has been taken since it was read
            checkpoint[WINDOW_KEY] = self._restored

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if checkpoint.get(WINDOW_KEY) and not self.ahead.needs_window:
            raise ValueError(
                "The checkpoint's run had groups under way ahead of training, whose prompts count as consumed: go on "
                "with max_staleness= or over_sampling= as it had them."
            )
        check_same_kind(checkpoint.get(WINDOW_KEY) or [], episodes=self.environment is not None)
        if self._async is not None:
            self._async.close()
        self._async, self._restored = None, checkpoint.get(WINDOW_KEY)

    @override
    def shutdown(self) -> None:
        if self._async is not None:
            self._async.close()
            self._async = None
        super().shutdown()

    @override
    def build_engine(self, trainer: pl.Trainer, model_directory: str | Path) -> RolloutEngine:
        arguments: dict[str, Any] = {
            "dtype": self.dtype or ("bfloat16" if trainer.precision == "bf16-mixed" else "float32"),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_bytes": self.kv_cache_bytes,
            "seed": self.sampling.seed,
            "engine_kwargs": self.engine_kwargs,
        }
        if self.mode == "server":
            return build_served_engine(self.server, trainer, model_directory, replica=arguments)
        from lightning_rlhf.rollout.vllm import VLLMEngine

        sharers = self.server.tensor_parallel_size
        return VLLMEngine(
            model_directory,
            replica_index=trainer.global_rank // sharers,
            tensor_parallel_size=sharers,
            local_rank=trainer.strategy.root_device.index or 0,
            **arguments,
        )
