"""The model that a policy's KL is measured against: where it is kept, and how it follows the actor."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.modules.engine_owner import EngineOwner
from lightning_rlhf.types import Experience


class ReferenceOwner(EngineOwner):
    """Keeps the reference: an engine of its own, or, where the actor trains an adapter, the actor without it."""

    def __init__(self) -> None:
        super().__init__()
        self._reference: BaseEngine | None = None
        self._reference_is_base = False

    @property
    def reference(self) -> BaseEngine:
        """The engine of the model that the KL is measured against.

        Raises:
            RuntimeError: if there is none of its own.
        """
        if self._reference is None:
            raise RuntimeError(
                "There is no reference engine: kl_coef is 0, the actor trains an adapter (and is its own reference "
                "without it), or Trainer.fit, validate or test has not begun."
            )
        return self._reference

    def check_reference_engine(self) -> None:
        """Hands the reference that an earlier Trainer has had built to this one's strategy.

        Raises:
            ValueError: if it does not fit.
        """
        if self._reference is not None:
            self._check_engine("reference", self._reference)

    def add_reference(self, actor: EngineConfig, *, moves: bool) -> None:
        """Builds the reference from the actor's config, before the actor shards the module it may be given. Collective.

        Args:
            actor: how the actor is trained; with an adapter, no second model is held.
            moves: whether it follows the actor, so that checkpoints hold it.
        """
        if actor.lora is not None:
            self._reference_is_base = True
            return
        config = dataclasses.replace(actor, role="reference", optimizer=None, lr_schedule=None, changes=moves)
        self._reference = self.create_engine("language_model", config)
        if moves:
            self.engine_modules["reference"] = self._reference.module

    def reference_log_probs(self, experience: Experience) -> Tensor | None:
        """``[num_tokens]`` of this rank's rows; None without a reference. Collective."""
        if self._reference is None and not self._reference_is_base:
            return None
        with self.timed("ref_log_probs"):
            if self._reference is not None:
                return self._reference.infer_batch(experience).log_probs
            actor = self._engines["actor"]
            with actor.disable_adapter():
                return actor.infer_batch(experience).log_probs


@torch.no_grad()
def move_reference(reference: BaseEngine, actor: BaseEngine, *, share: float) -> None:
    """``reference <- (1 - share) * reference + share * actor``, each rank on the parts that it holds; no collective.

    Both engines were built by one strategy from one model, so their parameters lie alike. In a
    back end that keeps them in bf16, a small share may round to no move at all.

    Args:
        reference: changed in place.
        actor: left alone.
        share: 1 copies; less is one step of an exponential moving average.

    Raises:
        RuntimeError: if the two do not hold the same parameters in the same shapes.
    """
    theirs = dict(actor.module.named_parameters())
    mine = dict(reference.module.named_parameters())
    unlike = sorted(theirs.keys() ^ mine.keys()) or [name for name, p in mine.items() if p.shape != theirs[name].shape]
    if unlike:
        raise RuntimeError(
            f"The reference cannot follow the actor: {', '.join(unlike[:3])} differ between the two engines."
        )
    for name, parameter in mine.items():
        target, source = (p.to_local() if isinstance(p, DTensor) else p for p in (parameter, theirs[name]))
        if target.shape != source.shape or target.dtype != source.dtype:
            raise RuntimeError(
                f"The reference cannot follow the actor: {name} lies as {target.dtype} {tuple(target.shape)} on this "
                f"rank, the actor's as {source.dtype} {tuple(source.shape)}."
            )
        if share == 1.0:
            target.copy_(source)
        else:
            target.lerp_(source.to(target.device), share)
