"""Moves the reference to where the actor is, or part of the way."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from lightning_rlhf.contracts.engine import BaseEngine


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
