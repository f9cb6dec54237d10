"""A checkpoint is a folder that is whole or absent: engines, the Trainer's state, the ranks' random state.

Layout::

    step.ckpt/
      manifest.json      written last; names every file with its size and CRC-32, and the back end that wrote it
      trainer.pt         Lightning's dictionary (loops, callbacks, data position, counters)
      rng_<rank>.pt      one rank's random-number state
      actor/ ...         one folder per engine, written by the engine

All ranks write into ``step.ckpt.part``; rank 0 renames it once every rank has finished, so an interrupted save leaves
only a ``.part`` folder behind.
"""

from __future__ import annotations

import io
import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_rlhf.contracts.callback import RNG_STATE_KEY

if TYPE_CHECKING:
    from lightning_rlhf.contracts.engine import BaseEngine
    from lightning_rlhf.strategies.base import RLStrategy

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer.pt"


def save(strategy: RLStrategy, checkpoint: dict[str, Any], path: Path) -> None:
    """Writes one checkpoint, or with ``strategy.async_save`` copies it and starts its writer. Collective.

    Raises:
        RuntimeError: if it could not be written on every rank; also the one before, if that was written meanwhile.
    """
    strategy.finish_save()
    trained = _trained(strategy)
    group = strategy.save_group
    checkpoint = dict(checkpoint)
    small = {f"rng_{strategy.global_rank}.pt": _bytes_of(checkpoint.pop(RNG_STATE_KEY, None))}
    checkpoint.pop("optimizer_states", None)  # the engines' folders hold these
    if strategy.is_global_zero:
        small[TRAINER_STATE] = _bytes_of(checkpoint)
    if group is None:
        _write(strategy, path, {role: engine.save_checkpoint for role, engine in trained.items()}, small, None)
    else:
        writers = {role: engine.checkpoint_writer(group) for role, engine in trained.items()}
        strategy.background.start(partial(_write, strategy, path, writers, small, group))


def _write(
    strategy: RLStrategy,
    path: Path,
    engines: Mapping[str, Callable[[Path], None]],
    small: Mapping[str, bytes],
    group: dist.ProcessGroup | None,
) -> None:
    """Writes all files and puts the folder in place. Collective, over ``group`` alone where one is given.

    Args:
        strategy: tells the rank and, without ``group``, how ranks agree.
        path: the checkpoint.
        engines: by role, what writes its folder.
        small: this rank's other files.
        group: of all ranks, for a thread in which the training's group must not be used.
    """
    part = _part_of(path)
    all_ranks = partial(_all_ranks, strategy, path, group)
    with all_ranks():
        if strategy.is_global_zero:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
    for role, write in engines.items():
        with all_ranks():
            write(part / role)
    with all_ranks():
        for name, content in small.items():
            (part / name).write_bytes(content)
    with all_ranks():
        digest = part / f"crc32_{strategy.global_rank}.json"
        digest.write_text(json.dumps(_checksums(part, _share(strategy, _files(part)))))
    with all_ranks():
        if strategy.is_global_zero:
            _write_manifest(strategy, part)
            _replace(part, path)


def _files(folder: Path) -> list[str]:
    """What a manifest names, in one order on every rank."""
    found = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return sorted(str(file) for file in found if not file.name.startswith("crc32_") and file.name != MANIFEST)


def _share(strategy: RLStrategy, files: list[str]) -> list[str]:
    """Those that this rank reads through."""
    return files[strategy.global_rank :: strategy.world_size]


def _checksums(folder: Path, files: list[str]) -> dict[str, int]:
    found = {}
    for name in files:
        crc = 0
        with (folder / name).open("rb") as file:
            while block := file.read(2**22):
                crc = zlib.crc32(block, crc)
        found[name] = crc
    return found


def _bytes_of(state: Any) -> bytes:
    """As torch.save writes it, in memory: its own error for a full disk would be a RuntimeError like any other."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _write_manifest(strategy: RLStrategy, part: Path) -> None:
    checksums: dict[str, int] = {}
    for digest in part.glob("crc32_*.json"):
        checksums.update(json.loads(digest.read_text()))
        digest.unlink()
    manifest = {
        "files": {name: (part / name).stat().st_size for name in _files(part)},
        "crc32": checksums,
        "backend": strategy.backend,
        "world_size": strategy.world_size,
    }
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1))


@contextmanager
def _all_ranks(strategy: RLStrategy, path: Path, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Runs the body on each rank, then waits for all; one rank's failed write is an error on every rank. Collective.

    What was written of the checkpoint is removed then: on a full disk it would stand in the next one's way.
    """
    failure: BaseException | None = None
    try:
        yield
    except (OSError, CheckpointException) as error:
        failure = error
    if not _all_agree(strategy, failure is None, group):
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else None
        _all_agree(strategy, True, group)  # all have looked before the room is given back
        if strategy.is_global_zero:
            shutil.rmtree(_part_of(path), ignore_errors=True)
        raise RuntimeError(
            f"Checkpoint {path} could not be written on every rank"
            + (
                f"; on this one ({strategy.global_rank}): {_reason(failure)}."
                if failure
                else "; see the others' errors."
            )
            + ("" if free is None else f" With what was written, its file system has {free} bytes free.")
            + " Earlier checkpoints are as they were."
        ) from failure


def _all_agree(strategy: RLStrategy, decision: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks say yes. Collective, over ``group`` alone where one is given."""
    if group is None:
        return strategy.reduce_boolean_decision(decision)
    votes = torch.tensor(int(decision))
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes)


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _reason(failure: BaseException) -> str:
    """The error of the operating system, out of what torch.distributed.checkpoint wraps around it."""
    if isinstance(failure, CheckpointException):
        causes = [f"rank {rank}: {cause[0]!r}" for rank, cause in failure.failures.items()]
        return "; ".join(causes)
    return str(failure)


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
    stored = _manifest(path)
    if stored is None:
        return False
    files = stored["files"]
    return all((path / name).is_file() and (path / name).stat().st_size == size for name, size in files.items())


def _manifest(path: Path) -> dict[str, Any] | None:
    """The manifest; None if it is not there or was cut short."""
    file = path / MANIFEST
    if not file.is_file():
        return None
    try:
        stored = json.loads(file.read_text())
    except ValueError:
        return None
    return stored if isinstance(stored, dict) and isinstance(stored.get("files"), dict) else None


def damaged_files(path: Path, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Files of a whole checkpoint whose bytes are not those that were written.

    Args:
        path: the checkpoint.
        rank: reads every ``world_size``-th file.
        world_size: processes that share the reading.
    """
    expected = (_manifest(path) or {}).get("crc32", {})
    names = sorted(expected)[rank::world_size]
    found = _checksums(path, names)
    return [name for name in names if found[name] != expected[name]]


def load(strategy: RLStrategy, path: Path) -> dict[str, Any]:
    """Loads the engines and returns Lightning's dictionary. Collective.

    Raises:
        ValueError: if the folder is not a whole checkpoint, or a file of it was changed.
    """
    if path.is_file():
        raise ValueError(
            f"{path} is a file, as plain strategies write them; {type(strategy).__name__} reads the folders that RL "
            "strategies write. Go on with strategy='auto' or 'ddp', or start from its export (`lightning-rlhf export`)."
        )
    if not is_complete(path):
        raise ValueError(
            f"{path} is not a whole checkpoint of {type(strategy).__name__}: {MANIFEST} is missing or names files that "
            f"are absent or cut short. Choose another checkpoint."
        )
    damaged = damaged_files(path, rank=strategy.global_rank, world_size=strategy.world_size)
    if not strategy.reduce_boolean_decision(not damaged):
        raise ValueError(
            f"{path} is damaged: {', '.join(damaged) or 'see the other ranks'}: its bytes are not those that were "
            f"written. Choose another checkpoint; ckpt_path='last' takes the newest whole one."
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
