"""A checkpoint is a folder that is whole or absent: engines, the Trainer's state, the ranks' random state.

Layout::

    step.ckpt/
      manifest.json      written last; names every file with its size
      trainer.pt         Lightning's dictionary (loops, callbacks, data position, counters)
      rng_<rank>.pt      one rank's random-number state
      actor/ ...         one folder per engine, written by the engine

All ranks write into ``step.ckpt.part``; rank 0 renames it once every rank has finished, so an interrupted save leaves
only a ``.part`` folder behind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_rlhf.contracts.callback import RNG_STATE_KEY

if TYPE_CHECKING:
    from lightning_rlhf.contracts.engine import BaseEngine
    from lightning_rlhf.strategies.base import RLStrategy

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer.pt"


def save(strategy: RLStrategy, checkpoint: dict[str, Any], path: Path) -> None:
    """Writes one checkpoint. Collective."""
    part = path.with_name(path.name + ".part")
    checkpoint = dict(checkpoint)
    rng = checkpoint.pop(RNG_STATE_KEY, None)
    checkpoint.pop("optimizer_states", None)  # the engines' folders hold these
    with _all_ranks(strategy, path):
        if strategy.is_global_zero:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
    for role, engine in _trained(strategy).items():
        engine.save_checkpoint(part / role)
    with _all_ranks(strategy, path):
        torch.save(rng, part / f"rng_{strategy.global_rank}.pt")
        if strategy.is_global_zero:
            torch.save(checkpoint, part / TRAINER_STATE)
    with _all_ranks(strategy, path):
        if strategy.is_global_zero:
            found = [file for file in sorted(part.rglob("*")) if file.is_file()]
            files = {str(file.relative_to(part)): file.stat().st_size for file in found}
            (part / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
            _replace(part, path)


@contextmanager
def _all_ranks(strategy: RLStrategy, path: Path) -> Iterator[None]:
    """Runs the body on each rank, then waits for all; one rank's failed write is an error on every rank. Collective."""
    failure: OSError | None = None
    try:
        yield
    except OSError as error:
        failure = error
    if not strategy.reduce_boolean_decision(failure is None):
        raise RuntimeError(
            f"Checkpoint {path} could not be written on every rank"
            + (f"; on this one ({strategy.global_rank}): {failure}." if failure else "; see the other ranks' errors.")
            + " Earlier checkpoints are as they were."
        ) from failure


def _trained(strategy: RLStrategy) -> dict[str, BaseEngine]:
    """The engines whose state a checkpoint holds: those that train, and a reference that follows the actor.

    Raises:
        RuntimeError: if there is none, which would make a checkpoint without a model.
    """
    trained = {
        role: engine
        for role, engine in strategy.engines.items()
        if engine.optimizer is not None or engine.config.changes
    }
    if not trained:
        raise RuntimeError(
            f"{type(strategy).__name__} knows no trained engine, so a checkpoint would hold no model. Engines are "
            f"created in the module's configure_model(); do not override it without calling super()."
        )
    return trained


def _replace(part: Path, path: Path) -> None:
    """Puts the finished folder in place. One that was there is whole as ``.old`` until the new one stands."""
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.is_dir():
        path.rename(old)
    part.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def is_complete(path: Path) -> bool:
    """Whether every file that the manifest names is there with its size."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return False
    files = json.loads(manifest.read_text())["files"]
    return all((path / name).is_file() and (path / name).stat().st_size == size for name, size in files.items())


def load(strategy: RLStrategy, path: Path) -> dict[str, Any]:
    """Loads the engines and returns Lightning's dictionary. Collective.

    Raises:
        ValueError: if the folder is not a whole checkpoint.
    """
    if not is_complete(path):
        raise ValueError(
            f"{path} is not a whole checkpoint of {type(strategy).__name__}: {MANIFEST} is missing or names files that "
            f"are absent or cut short. Choose another checkpoint."
        )
    for role, engine in _trained(strategy).items():
        engine.load_checkpoint(path / role)
    checkpoint: dict[str, Any] = torch.load(path / TRAINER_STATE, map_location="cpu", weights_only=True)
    checkpoint["optimizer_states"] = []
    rng = path / f"rng_{strategy.global_rank}.pt"
    # a rank that the saving run did not have goes on with the state that its seed gave it
    if rng.is_file():
        checkpoint[RNG_STATE_KEY] = torch.load(rng, map_location="cpu", weights_only=True)
    return checkpoint
