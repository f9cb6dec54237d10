"""An engine's state in a folder: tensors by torch.distributed.checkpoint, numbers in a file that holds no code.

Tensors are stored under ``model.<hf name>`` and ``optimizer.<hf name>.<key>``, sharded tensors as shards with their
global shapes, so any number of ranks can read what any other number wrote.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rlhf.engines.safe_reader import SafeFileSystemReader, check_loads

NUMBERS_FILE = "numbers.pt"
"""Hyper-parameters of the optimizer's groups and the state of the schedule."""

_METADATA_FILE = ".metadata"
"""What torch.distributed.checkpoint writes last."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a checkpoint holds of an engine.

    Attributes:
        tensors: by the names they are stored under; sharded ones as this rank's shards.
        numbers: the bytes of ``NUMBERS_FILE``.
    """

    tensors: dict[str, Tensor]
    numbers: bytes

    def on_host(self) -> State:
        """A copy in host memory, which no later step changes."""
        return State(tensors={name: _host_copy(value) for name, value in self.tensors.items()}, numbers=self.numbers)


def state_of(
    model: nn.Module, optimizer: Optimizer | None, lr_scheduler: LRScheduler | None, *, trained_only: bool = False
) -> State:
    """Collects the state without copying tensors.

    Args:
        model: has the parameters under Hugging Face names.
        optimizer: of the model's parameters, or None.
        lr_scheduler: of the optimizer, or None.
        trained_only: leave out what has no gradient: the frozen base of an adapter.

    Raises:
        ValueError: if the schedule or a parameter group holds anything but plain numbers, strings and containers.
    """
    numbers = io.BytesIO()
    torch.save(_numbers(optimizer, lr_scheduler), numbers)
    check_loads(numbers)
    tensors = {f"model.{name}": value for name, value in _model_tensors(model, trained_only).items()}
    names = _parameter_names(model)
    if optimizer is not None:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"optimizer.{names[parameter]}.{key}"] = torch.as_tensor(value)
    return State(tensors=tensors, numbers=numbers.getvalue())


def save(path: Path, state: State, *, group: dist.ProcessGroup | None) -> None:
    """Writes the state into the folder ``path``. Collective over ``group``.

    Args:
        path: the folder; made if absent, and without a checkpoint in it.
        state: of this rank.
        group: the ranks that hold the model's parts; None for one process.

    Raises:
        FileExistsError: if the folder holds a checkpoint: overwriting it in place could leave a mixture of two.
    """
    if (path / _METADATA_FILE).exists():
        raise FileExistsError(f"{path} holds a checkpoint already. Save into a fresh folder and move it into place.")
    path.mkdir(parents=True, exist_ok=True)
    if group is None:
        with _one_process_is_meant():
            dcp_save(state.tensors, checkpoint_id=path, no_dist=True)
    else:
        dcp_save(state.tensors, checkpoint_id=path, process_group=group)
    failure: OSError | None = None
    if group is None or dist.get_rank(group) == 0:
        try:
            (path / NUMBERS_FILE).write_bytes(state.numbers)
        except OSError as error:
            failure = error
    if group is not None:
        dist.barrier(group)
    if failure is not None:  # after the barrier: no rank waits for this one any more
        raise failure


def _host_copy(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.detach().to("cpu", copy=True)
    # the mesh stays the device's: it tells which part of the whole this is, and nothing is sent over it any more
    return DTensor(value.to_local().detach().to("cpu", copy=True), value._spec, requires_grad=False)


def load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    lr_scheduler: LRScheduler | None,
    *,
    group: dist.ProcessGroup | None,
    trained_only: bool = False,
) -> None:
    """Reads what ``save`` wrote, into the given objects. Collective over ``group``.

    Args:
        path: the folder.
        model: as at ``save``, on any number of ranks.
        optimizer: of the same kind, with the same groups.
        lr_scheduler: of the same kind, or None.
        group: the ranks that hold the model's parts; None for one process.
        trained_only: leave out what has no gradient: the frozen base of an adapter.

    Raises:
        ValueError: if the checkpoint has no optimizer or schedule where there is one, or other parameter groups.
    """
    numbers = torch.load(path / NUMBERS_FILE, weights_only=True, map_location="cpu")
    reader = SafeFileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {f"model.{name}": value for name, value in _model_tensors(model, trained_only).items()}
    missing = [name.removeprefix("model.") for name in tensors if name not in stored]
    if missing:
        raise ValueError(
            f"The checkpoint {path} lacks {len(missing)} tensors of this model, {missing[0]} first. Was it saved with "
            f"another model, or with (without) lora?"
        )
    states: dict[Tensor, dict[str, Tensor]] = {}
    if optimizer is not None:
        states = _empty_states(optimizer, _parameter_names(model), stored)
        for parameter, name in _parameter_names(model).items():
            for key, value in states.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
    with _one_process_is_meant():
        dcp_load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    if optimizer is not None:
        _restore_optimizer(optimizer, states, numbers["param_groups"])
    if lr_scheduler is not None:
        if numbers["lr_scheduler"] is None:
            raise ValueError(f"The checkpoint {path} has no learning-rate schedule; it was saved without one.")
        lr_scheduler.load_state_dict(numbers["lr_scheduler"])


def read_model(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields what ``save`` wrote of the model: Hugging Face name and full tensor, one at a time, in one process.

    Args:
        path: the folder.

    Raises:
        ValueError: if the folder holds no model in this layout.
    """
    stored = SafeFileSystemReader(path).read_metadata().state_dict_metadata
    names = [name for name in stored if name.startswith("model.")]
    if not names:
        raise ValueError(f"{path} holds no tensor model.<name>; it has {', '.join(sorted(stored)[:4])}, ...")
    for name in names:
        entry = stored[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{path}: {name} is not a tensor.")
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with _one_process_is_meant():
            dcp_load({name: tensor}, storage_reader=SafeFileSystemReader(path), no_dist=True)
        yield name.removeprefix("model."), tensor


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _model_tensors(model: nn.Module, trained_only: bool) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each once: a tied weight under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen and (value.requires_grad or not trained_only):
            seen.add(id(value))
            found[name] = value.detach()
    return found


def _parameter_names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _numbers(optimizer: Optimizer | None, lr_scheduler: LRScheduler | None) -> dict[str, Any]:
    groups = None
    if optimizer is not None:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"param_groups": groups, "lr_scheduler": None if lr_scheduler is None else lr_scheduler.state_dict()}


def _empty_states(
    optimizer: Optimizer, names: dict[Tensor, str], stored: dict[str, Any]
) -> dict[Tensor, dict[str, Tensor]]:
    """For each trained parameter the tensors that the checkpoint has for it, laid out as on this rank, to be filled."""
    states: dict[Tensor, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            prefix = f"optimizer.{names[parameter]}."
            keys = [name.removeprefix(prefix) for name in stored if name.startswith(prefix)]
            for key in sorted(key for key in keys if "." not in key):
                entry = stored[prefix + key]
                if not isinstance(entry, TensorStorageMetadata):
                    raise ValueError(f"{prefix}{key} is not a tensor in this checkpoint.")
                dtype = entry.properties.dtype
                like_parameter = entry.size == parameter.shape
                value = (
                    torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                    if like_parameter
                    else torch.empty(entry.size, dtype=dtype)
                )
                states.setdefault(parameter, {})[key] = value
    return states


def _restore_optimizer(
    optimizer: Optimizer, states: dict[Tensor, dict[str, Tensor]], groups: list[dict[str, Any]] | None
) -> None:
    if groups is None or len(groups) != len(optimizer.param_groups):
        saved = "no optimizer" if groups is None else f"{len(groups)} parameter group(s)"
        raise ValueError(
            f"The checkpoint has {saved}, this optimizer has {len(optimizer.param_groups)} group(s). Build the "
            f"optimizer as it was built for the run that saved it."
        )
    optimizer.state.clear()
    optimizer.state.update(states)
    for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved_group)
