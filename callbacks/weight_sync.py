"""The weight-sync callback: after the optimizer step the rollout engine gets the new weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.contracts.rollout import RolloutEngine
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.weights.manager import (
    PROBE_TOLERANCE_BF16,
    PROBE_TOLERANCE_FP32,
    CheckpointEngineManager,
    Receipt,
)
from lightning_rlhf.weights.roll_call import TrainerRankLostError
from lightning_rlhf.weights.update_under_way import UpdateUnderWay

if TYPE_CHECKING:
    from lightning_rlhf.rollout.served import ServedRolloutEngine

ROLLOUT_SECONDS = 1800.0
"""Longest time that a rank may be busy with its share of a rollout, a turn of an environment say, between two looks."""
PROBE_TEXT = "A probe: both sides read these words and must agree on each of them."
PROBE_LENGTH = 24


class WeightSync(RLCallback):
    """Pushes the actor's weights into the rollout engine, and checks a receipt each time.

    Whenever the pushes happen, no response is ever sampled from weights older than the policy version that it is
    tagged with: before a rollout, ``ensure_fresh`` pushes if the versions differ, so also after a resume.

    Args:
        engine: the checkpoint engine that carries the tensors, by name.
        engine_kwargs: its own arguments, such as ``{"folder": ...}`` of ``disk`` or ``{"bucket_bytes": ...}``.
        every: ``"optimizer_step"`` pushes after each step of the actor; ``"rollout"`` once, before the next rollout,
            which saves pushes that nobody reads when an RL step takes several optimizer steps; a number ``n`` after
            every n-th, for rollouts that run ahead anyway (``VLLMRollout(max_staleness=...)``).
        probe_tolerance: largest log-prob difference on the probe, in nats; None allows 0.01 in fp32, and 1.0 if trainer
            or rollout engine computes in bf16, whose rounding alone reaches 0.3 nats on a rare token.
        overlap: replicas take a copy of the weights while the next step computes, and whatever is asked of them
            meanwhile waits for it; for rollouts that run ahead (``VLLMRollout(max_staleness=...)``), since others need
            the new weights at once. What is wrong with a push shows at the next one, or when a rollout waits for it.
            Costs memory for one more copy of the weights.
        timeout: longest time in seconds that a trainer rank may be late for a push, or for the next tensor in it; the
            message names those missing. The rank that feeds replicas may in addition wait for these.

    Attributes:
        last_receipt: what the last push found.
    """

    def __init__(
        self,
        *,
        engine: str = "naive",
        engine_kwargs: Mapping[str, Any] | None = None,
        every: Literal["optimizer_step", "rollout"] | int = "optimizer_step",
        overlap: bool = False,
        probe_tolerance: float | None = None,
        timeout: float = 600.0,
    ) -> None:
        number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if every not in ("optimizer_step", "rollout") and not number:
            raise ValueError(f"WeightSync(every={every!r}): expected 'optimizer_step', 'rollout' or a number of steps.")
        self.checkpoint_engine = CheckpointEngineRegistry.new(engine, **(engine_kwargs or {}))
        self.every = every
        if overlap and not self.checkpoint_engine.remote:
            raise ValueError(
                f"WeightSync(engine={engine!r}, overlap=True): this engine loads weights in the training process, "
                "which cannot compute meanwhile. Use engine='shm' or another that reaches replicas, or overlap=False."
            )
        self.overlap = overlap
        if not timeout > 0:
            raise ValueError(f"WeightSync(timeout={timeout}): expected seconds, more than 0.")
        if probe_tolerance is not None and not probe_tolerance >= 0:
            raise ValueError(f"WeightSync(probe_tolerance={probe_tolerance}): expected nats, at least 0.")
        self.probe_tolerance = probe_tolerance
        self.timeout = timeout
        self.last_receipt: Receipt | None = None
        self._manager: CheckpointEngineManager | None = None
        self._rollout: RolloutEngine | None = None
        self._under_way: UpdateUnderWay | None = None
        self._losses_before = 0

    @override
    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        if step.role != "actor" or not step.stepped or self.every == "rollout":
            return
        module = as_on_policy(pl_module, callback=self)
        if isinstance(self.every, int) and module.policy_version % self.every:
            return
        # before the first rollout there is no engine to push to; ensure_fresh serves it then
        if self._manager is not None:
            with module.timed("sync"):
                if self.overlap:
                    self._finish(module, self._manager)
                    self._start(self._manager, module.policy_version)
                else:
                    self._keep(module, self._push(self._manager, module.policy_version))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._manager is not None:
            self._finish(as_on_policy(pl_module, callback=self), self._manager)
            self._manager.drop_copies()

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # the version that comes with the checkpoint may equal the engine's by chance
        self._manager = None

    @property
    def lag(self) -> int:
        """Policy versions that the rollout engine's weights may be behind the policy's, between two pushes."""
        return self.every - 1 if isinstance(self.every, int) else 0

    def ensure_fresh(
        self, module: OnPolicyModule, rollout: RolloutEngine, *, max_lag: int = 0, runs_ahead: bool = False
    ) -> None:
        """Pushes if the rollout engine does not hold the policy version, or one not too far behind. Collective.

        Args:
            module: whose actor's weights they are.
            rollout: the engine that is about to sample.
            max_lag: versions that it may be behind; a replica that started again and has no weights gets a push all
                the same.
            runs_ahead: what it samples may wait for a push that is under way.
        """
        if self._manager is None or self._rollout is not rollout or self._manager.engine is not module.actor:
            if self._under_way is not None:  # of a run that broke off: it has the checkpoint engine until it ends
                self._under_way.failure()
                self._under_way = None
            self._manager = self._build_manager(module, rollout)
            self._rollout = rollout
            # versions are counted by each module for itself: equal numbers of two modules are not equal weights
            rollout.weight_version = None
            self._let_it_push(module, rollout, self._manager)
        if runs_ahead and self._under_way is not None and module.policy_version - self._under_way.version <= max_lag:
            return
        with module.timed("sync"):
            self._finish(module, self._manager)
        held = rollout.weight_version
        new_enough = bool(max_lag) and held is not None and 0 <= module.policy_version - held <= max_lag
        if new_enough and not self._manager.any_rank(self._some_lack_weights()):
            return
        self._find_replicas(self._manager)
        with module.timed("sync"):
            if not self._manager.is_stale(module.policy_version):
                return
            if runs_ahead and self.overlap and held is not None:
                self._start(self._manager, module.policy_version)
            else:
                self._keep(module, self._push(self._manager, module.policy_version))

    def _let_it_push(self, module: OnPolicyModule, rollout: RolloutEngine, manager: CheckpointEngineManager) -> None:
        """Has the rollout engine push while it waits for responses of replicas that have started again."""
        from lightning_rlhf.rollout.push_rounds import Pushes, PushRounds
        from lightning_rlhf.rollout.served import ServedRolloutEngine

        if not isinstance(rollout, ServedRolloutEngine) or not self.checkpoint_engine.remote:
            return

        def push() -> None:
            self._finish(module, manager)  # it has the checkpoint engine, and perhaps brings what is waited for
            self._find_replicas(manager)
            if manager.is_stale(module.policy_version):
                self._keep(module, self._push(manager, module.policy_version))

        def needed() -> bool:
            return rollout.pool.waits_for_push() or (self._under_way is not None and self._under_way.has_failed)

        if module.trainer.world_size == 1:
            rollout.pushes = Pushes(needed=needed, push=push)
        else:
            exchange = partial(manager.exchange, phase="rollout", seconds=ROLLOUT_SECONDS)
            rollout.pushes = PushRounds(exchange=exchange, needed=needed, push=push)

    def _some_lack_weights(self) -> bool:
        """Whether a replica of this rank has started again, and no push has reached it since."""
        return self.checkpoint_engine.remote and bool(self._served().pool.without_weights())

    def _build_manager(self, module: OnPolicyModule, rollout: RolloutEngine) -> CheckpointEngineManager:
        bf16 = torch.bfloat16 in (module.actor.config.compute_dtype, rollout.compute_dtype)
        tolerance = PROBE_TOLERANCE_BF16 if bf16 else PROBE_TOLERANCE_FP32
        probe_length = max(2, min(PROBE_LENGTH, rollout.max_model_len - 1))  # scoring may take one id more
        return CheckpointEngineManager(
            engine=module.actor,
            rollout=None if self.checkpoint_engine.remote else rollout,
            checkpoint_engine=self.checkpoint_engine,
            probe_token_ids=module.tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"][:probe_length],
            probe_tolerance=tolerance if self.probe_tolerance is None else self.probe_tolerance,
            rank_timeout=self.timeout,
            feeding=rollout.longest_wait,
        )

    def _push(self, manager: CheckpointEngineManager, version: int) -> Receipt:
        """Pushes, and again to those that are left whenever replicas are lost in the middle. Collective."""
        if not self.checkpoint_engine.remote:
            return manager.update_weights(version)
        while True:
            losses = self._losses()
            self._find_replicas(manager)
            try:
                return manager.update_weights(version)
            except TrainerRankLostError:
                raise
            except Exception as error:  # noqa: BLE001 (raised if no replica was lost)
                self._raise_unless_lost(manager, losses, error)

    def _raise_unless_lost(self, manager: CheckpointEngineManager, losses: int, error: Exception) -> None:
        """A push that failed with a replica is no error. All ranks are here: it failed on every one. Collective."""
        lost = self._losses() > losses
        if not manager.any_rank(lost):
            raise error
        warnings.warn(f"A replica was lost in a push; those that are left need another one: {error}", stacklevel=3)

    def _start(self, manager: CheckpointEngineManager, version: int) -> None:
        """Begins a push; requests wait for it from now on. Collective."""
        self._losses_before = self._losses()
        self._find_replicas(manager)
        self._under_way = manager.start_update(version)
        self._served().expect_version(version)

    def _finish(self, module: OnPolicyModule, manager: CheckpointEngineManager) -> None:
        """Waits for the push that is under way, if one is. After one that failed with a replica, another must follow.

        Collective.
        """
        update = self._under_way
        if update is None:
            return
        update.failure()  # waits; interrupted here, it stays noted
        self._under_way = None
        try:
            receipt = manager.finish_update(update)
        except TrainerRankLostError:
            raise
        except Exception as error:  # noqa: BLE001 (raised if no replica was lost)
            self._raise_unless_lost(manager, self._losses_before, error)
        else:
            self._note(module, receipt)

    def _losses(self) -> int:
        """How often replicas were lost so far, by a look at each of them."""
        from lightning_rlhf.callbacks.served_replicas import losses_of

        return losses_of(self._served())

    def _find_replicas(self, manager: CheckpointEngineManager) -> None:
        """Those that are there now: one that started again is new, and one that is gone is left out."""
        if not self.checkpoint_engine.remote:
            return
        from lightning_rlhf.callbacks.served_replicas import replicas_of

        manager.replicas = replicas_of(self._served())

    def _served(self) -> ServedRolloutEngine:
        from lightning_rlhf.rollout.served import ServedRolloutEngine

        if not isinstance(self._rollout, ServedRolloutEngine):
            raise ValueError(
                f"{type(self.checkpoint_engine).__name__} carries weights to other processes, but "
                f"{type(self._rollout).__name__} samples in this one: use WeightSync(engine='naive'), or "
                f"VLLMRollout(mode='server')."
            )
        return self._rollout

    def _keep(self, module: OnPolicyModule, receipt: Receipt) -> None:
        if self.checkpoint_engine.remote:
            self._served().expect_version(receipt.version)
        self._note(module, receipt)

    def _note(self, module: OnPolicyModule, receipt: Receipt) -> None:
        self.last_receipt = receipt
        module.note_metrics(
            {
                "sync/version": float(receipt.version),
                "sync/probe_difference": receipt.probe_difference,
                "sync/tensors_compared": float(receipt.tensors_compared),
                "sync/unchanged": float(receipt.unchanged),
            }
        )
