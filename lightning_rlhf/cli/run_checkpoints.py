"""The checkpoints of a run, and the policy inside one, read in one process without an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from lightning_rlhf.callbacks.checkpoint import WANDB_RUN_ID, is_whole
from lightning_rlhf.cli.megatron_weights import megatron_weights
from lightning_rlhf.cli.run import CONFIG_FILE
from lightning_rlhf.cli.run_records import RecordError, if_absent
from lightning_rlhf.engines.adapter import merge_into
from lightning_rlhf.engines.checkpoint import read_model
from lightning_rlhf.modules.on_policy import COUNTERS_KEY
from lightning_rlhf.strategies.checkpoints import MANIFEST, TRAINER_STATE

_NAME = re.compile(r"rl_step=(\d+)(?:-v\d+)?\.ckpt$")
_ACTOR = "engine_modules.actor.hf_model."
"""Before the actor's names in the one file of a plain strategy."""


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest whole one of a run.

    Args:
        source: a checkpoint, a run's folder, or its folder of checkpoints.

    Raises:
        RecordError: if there is none that is whole.
    """
    if source.is_file() or (source / MANIFEST).is_file() or source.suffix == ".ckpt":
        if not is_whole(source):
            raise RecordError(f"{source} is not a whole checkpoint: it is absent, cut short, or was never finished.")
        return source
    for folder in (source / "checkpoints", source):
        found = {int(match[1]): path for path in folder.glob("*.ckpt") if (match := _NAME.match(path.name))}
        whole = {step: path for step, path in found.items() if is_whole(path)}
        if whole:
            return whole[max(whole)]
        if found:
            raise RecordError(f"{folder}: none of {', '.join(sorted(p.name for p in found.values()))} is whole.")
    raise RecordError(
        f"{source} is neither a checkpoint nor the folder of a run that has one (checkpoints/*.ckpt)."
        f"{if_absent(source)}"
    )


def model_of_run(checkpoint: Path) -> str:
    """The model that the run started from, by the configuration beside its checkpoints.

    Raises:
        RecordError: if there is no configuration.
    """
    for folder in checkpoint.resolve().parents[:2]:
        file = folder / CONFIG_FILE
        if file.is_file():
            return str(yaml.safe_load(file.read_text(encoding="utf-8"))["model"]["path"])
    raise RecordError(
        f"{checkpoint}: no {CONFIG_FILE} beside it says which model the run started from. Name its directory, which "
        f"has config and tokenizer: --model DIR."
    )


def wandb_run_id(checkpoint: Path) -> str | None:
    """The W&B run that wrote a checkpoint; None if there was none."""
    file = checkpoint / TRAINER_STATE if checkpoint.is_dir() else checkpoint
    stored = torch.load(file, map_location="cpu", weights_only=True, mmap=not checkpoint.is_dir())
    for state in stored.get("callbacks", {}).values():
        if isinstance(state, dict) and state.get(WANDB_RUN_ID) is not None:
            return str(state[WANDB_RUN_ID])
    return None


def actor_weights(checkpoint: Path, *, base: str) -> Iterator[tuple[str, Tensor]]:
    """The policy in a checkpoint: Hugging Face names and full tensors, in the dtype of training.

    Args:
        checkpoint: a whole one, of any number of ranks.
        base: the model that the run started from, into which an adapter is merged.

    Raises:
        RecordError: for a layout that cannot be read here.
    """
    if checkpoint.is_dir() and _backend_of(checkpoint) == "megatron":
        return megatron_weights(checkpoint / "actor", base=base)
    lora = adapter_of(checkpoint)
    named = stored_actor(checkpoint)
    return named if lora is None else merge_into(base, lora, named)


def adapter_of(checkpoint: Path) -> dict[str, Any] | None:
    """The settings of the adapter that a checkpoint holds; None if it holds a model's parameters.

    Raises:
        RecordError: for a layout that cannot be read here.
    """
    if checkpoint.is_dir():
        _check_layout(checkpoint)
    file = checkpoint / TRAINER_STATE if checkpoint.is_dir() else checkpoint
    stored = torch.load(file, map_location="cpu", weights_only=True, mmap=not checkpoint.is_dir())
    counters = stored.get(COUNTERS_KEY) if isinstance(stored, dict) else None
    return counters.get("lora") if isinstance(counters, dict) else None


def stored_actor(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of the actor, as it is stored; see ``adapter_of`` for which can be read."""
    if checkpoint.is_dir():
        yield from read_model(checkpoint / "actor")
        return
    state = _state_of_file(checkpoint)
    yield from ((name.removeprefix(_ACTOR), tensor) for name, tensor in state.items() if name.startswith(_ACTOR))


def _check_layout(checkpoint: Path) -> None:
    backend = _backend_of(checkpoint)
    if backend == "megatron":
        raise RecordError(f"{checkpoint} is of the megatron back end, which trains no adapter; leave out --adapter.")
    if not (checkpoint / "actor" / ".metadata").is_file():
        raise RecordError(
            f"{checkpoint}: exporting a checkpoint of the {backend or 'unknown'} back end is not possible; it reads "
            f"those of torch, fsdp2, ulysses and megatron. The run's own export (callbacks.export) writes an HF "
            f"directory from any back end."
        )


def _backend_of(checkpoint: Path) -> str | None:
    backend = json.loads((checkpoint / MANIFEST).read_text()).get("backend")
    return None if backend is None else str(backend)


def _state_of_file(checkpoint: Path) -> dict[str, Any]:
    loaded = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    state = loaded.get("state_dict", {}) if isinstance(loaded, dict) else {}
    if not any(name.startswith(_ACTOR) for name in state):
        raise RecordError(f"{checkpoint} holds no actor of this package; its state begins with {list(state)[:3]}.")
    return state
