"""A model's and its optimizer's state in a folder, by megatron's dist_checkpointing: readable in another layout.

Tensors are stored under their global names with their global shapes, so that ranks of any layout read the ranges that
they hold. Without a distributed optimizer this holds for the optimizer's moments and fp32 parameters as well, whatever
the tensor, pipeline, expert, context or data parallel sizes are. A distributed optimizer's state is read in any layout
in which experts are cut over ranks, or not, as they were.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rlhf.engines.megatron.data_parallel import DataParallelOptions
from lightning_rlhf.engines.megatron.layout import MegatronLayout
from lightning_rlhf.engines.megatron.optimizer import MegatronOptimizer
from lightning_rlhf.engines.safe_reader import SafeFileSystemReader, check_loads

NUMBERS_FILE = "numbers.pt"
"""Hyper-parameters of the optimizer's groups, its step, the schedule's state, and how the optimizer was cut."""

_COMMON_FILE = "common.pt"
"""What megatron writes beside tensors in parts; read with ``weights_only=True``, also by megatron."""


@dataclass(frozen=True, kw_only=True)
class Checkpointed:
    """What a checkpoint is of.

    Attributes:
        chunks: this rank's model chunks, unwrapped.
        optimizer: of their parameters, or None.
        lr_scheduler: of the optimizer, or None.
        layout: sizes of the axes.
        data_parallel: how the optimizer lies on data-parallel ranks.
    """

    chunks: Sequence[Any]
    optimizer: MegatronOptimizer | None
    lr_scheduler: LRScheduler | None
    layout: MegatronLayout
    data_parallel: DataParallelOptions

    @property
    def is_distributed(self) -> bool:
        """Whether data-parallel ranks share the optimizer's state."""
        return self.data_parallel.distributed_optimizer


def save(path: Path, subject: Checkpointed) -> None:
    """Writes the state into the folder ``path``. Collective over all ranks.

    Args:
        path: the folder; made if absent, and without a checkpoint in it.
        subject: what to write.

    Raises:
        FileExistsError: if the folder holds a checkpoint.
        ValueError: if the schedule or a parameter group holds anything but plain numbers, strings and containers.
    """
    from megatron.core import dist_checkpointing

    if (path / ".metadata").exists():
        raise FileExistsError(f"{path} holds a checkpoint already. Save into a fresh folder and move it into place.")
    numbers = io.BytesIO()
    torch.save(_numbers(subject), numbers)
    check_loads(numbers)
    dist.barrier()  # nobody writes before all have looked
    path.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(_sharded_state(subject, loading=False), str(path))
    _end_writers()
    if dist.get_rank() == 0:
        (path / NUMBERS_FILE).write_bytes(numbers.getvalue())
    dist.barrier()


def load(path: Path, subject: Checkpointed) -> None:
    """Reads what ``save`` wrote, into the given objects. Collective over all ranks.

    Args:
        path: the folder.
        subject: of the same model, in any layout; an optimizer of the same kind with the same groups.

    Raises:
        ValueError: if the checkpoint has no optimizer or schedule where there is one, other parameter groups, or an
            optimizer in parts that this layout cannot read; before anything is changed.
        pickle.UnpicklingError: if a file would run code.
    """
    from megatron.core import dist_checkpointing

    numbers = torch.load(path / NUMBERS_FILE, weights_only=True, map_location="cpu")
    _check_files(path)
    _check_fits(path, numbers, subject)
    state = _sharded_state(subject, loading=True)
    loaded = dist_checkpointing.load(state, str(path))
    for index, chunk in enumerate(subject.chunks):
        tensors = loaded[f"model{index}"]
        extra = [name for name in chunk.state_dict(keep_vars=True) if name.endswith("_extra_state")]
        chunk.load_state_dict({**tensors, **dict.fromkeys(extra)}, strict=True)
    if subject.optimizer is not None:
        _restore_optimizer(subject, subject.optimizer, loaded["optimizer"], numbers)
    if subject.lr_scheduler is not None:
        subject.lr_scheduler.load_state_dict(numbers["lr_scheduler"])


# --- what is written -------------------------------------------------------------------------------------------------


def _sharded_state(subject: Checkpointed, *, loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if subject.is_distributed:
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
    models = {
        f"model{index}": _without_extra_state(chunk.sharded_state_dict(metadata=metadata))
        for index, chunk in enumerate(subject.chunks)
    }
    if subject.optimizer is None:
        return models
    inner = subject.optimizer.inner
    if subject.is_distributed:
        parts = inner.sharded_state_dict(_one_or_all(models), is_loading=loading, metadata=metadata)
    else:
        parts = {
            str(index): _tensors_of(part.sharded_state_dict(_one_or_all(models), is_loading=loading))
            for index, part in enumerate(inner.chained_optimizers)
        }
    return {**models, "optimizer": parts}


def _without_extra_state(model: dict[str, Any]) -> dict[str, Any]:
    """A chunk's tensors. What its layers keep besides (of fp8 alone) would be pickled, and is left out."""
    from megatron.core.dist_checkpointing import ShardedObject

    objects = {name for name, value in model.items() if isinstance(value, ShardedObject)}
    strangers = sorted(name for name in objects if not name.endswith("_extra_state"))
    if strangers:
        raise ValueError(f"The model has state that is no tensor and would have to be pickled: {strangers[:5]}.")
    return {name: value for name, value in model.items() if name not in objects}


def _one_or_all(models: dict[str, Any]) -> Any:
    return models["model0"] if len(models) == 1 else models


def _tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    """A part's tensors alone: moments by number of the parameter, and fp32 parameters of a bf16 model.

    Groups and steps, whose structure depends on the layout, are numbers that ``NUMBERS_FILE`` holds.
    """
    moments = state.get("optimizer", state)["state"]
    kept: dict[str, Any] = {
        "moments": {
            str(number): {name: value for name, value in values.items() if name != "step" and value is not None}
            for number, values in moments.items()
            if number != "common_step"
        }
    }
    if "fp32_from_fp16_params" in state:
        kept["fp32"] = state["fp32_from_fp16_params"]
    return kept


def _numbers(subject: Checkpointed) -> dict[str, Any]:
    optimizer = subject.optimizer
    numbers: dict[str, Any] = {
        "param_groups": None,
        "lr_scheduler": None if subject.lr_scheduler is None else subject.lr_scheduler.state_dict(),
        "distributed_optimizer": subject.is_distributed,
        "layout": subject.layout.describe(),
    }
    if optimizer is not None:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        numbers |= {
            "param_groups": groups,
            "kind": optimizer.kind.__name__,
            "num_parts": len(optimizer.inner.chained_optimizers),
            "step": _step(optimizer),
        }
    return numbers


def _step(optimizer: MegatronOptimizer) -> float:
    """Steps taken: with torch's AdamW in each parameter's state, with fused ones in the groups."""
    found = {0.0}
    for part in optimizer.inner.chained_optimizers:
        found |= {float(state["step"]) for state in part.optimizer.state.values() if "step" in state}
        found |= {float(group["step"]) for group in part.param_groups if "step" in group}
    # ranks whose stage has no parameter of some kind have no step of it
    largest = torch.tensor(max(found), device=torch.cuda.current_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _end_writers() -> None:
    """Ends the process through which megatron's writers report; a new one costs less than one that stays behind."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writers

    writers._results_queue = None


# --- what is read ----------------------------------------------------------------------------------------------------


def _check_files(path: Path) -> None:
    """Refuses files that megatron would unpickle more of than tensors and a checkpoint's own classes.

    It reads the metadata without limits, so one that has limits reads it first. ``common.pt`` goes through torch.load,
    which loads weights only unless an environment variable forbids it.
    """
    metadata = SafeFileSystemReader(path).read_metadata()
    objects = [name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    if objects:
        raise pickle.UnpicklingError(
            f"{path} holds objects that are no tensors, which nobody has asked for: {objects[:5]}."
        )
    torch.load(path / _COMMON_FILE, weights_only=True, map_location="cpu")


def _check_fits(path: Path, numbers: dict[str, Any], subject: Checkpointed) -> None:
    if subject.lr_scheduler is not None and numbers["lr_scheduler"] is None:
        raise ValueError(f"The checkpoint {path} has no learning-rate schedule; it was saved without one.")
    optimizer = subject.optimizer
    if optimizer is None:
        return
    if numbers["param_groups"] is None or len(numbers["param_groups"]) != len(optimizer.param_groups):
        saved = "no optimizer" if numbers["param_groups"] is None else f"{len(numbers['param_groups'])} group(s)"
        raise ValueError(
            f"The checkpoint has {saved}, this optimizer has {len(optimizer.param_groups)} group(s). Build the "
            f"optimizer as it was built for the run that saved it."
        )
    if numbers["kind"] != optimizer.kind.__name__:
        raise ValueError(
            f"The checkpoint {path} is of {numbers['kind']}, this run trains by {optimizer.kind.__name__}."
        )
    if numbers["distributed_optimizer"] != subject.is_distributed:
        raise ValueError(
            f"The checkpoint {path} was saved with distributed_optimizer={numbers['distributed_optimizer']}, this run "
            f"has {subject.is_distributed}: its state is laid out otherwise. Resume with the same setting."
        )
    parts = len(optimizer.inner.chained_optimizers)
    if subject.is_distributed and numbers["num_parts"] != parts:
        raise ValueError(
            f"The checkpoint {path} was saved in the layout {numbers['layout']} with a distributed optimizer in "
            f"{numbers['num_parts']} part(s), the layout {subject.layout.describe()} has {parts}: megatron-core cannot "
            f"move that state between layouts that cut experts over ranks and others. Resume with "
            f"expert_parallel_size as saved, save with distributed_optimizer=False, or export the weights and start "
            f"from them with a new optimizer."
        )


def _restore_optimizer(
    subject: Checkpointed, optimizer: MegatronOptimizer, loaded: dict[str, Any], numbers: dict[str, Any]
) -> None:
    if subject.is_distributed:
        optimizer.inner.load_state_dict(loaded)
    else:
        for index, part in enumerate(optimizer.inner.chained_optimizers):
            _restore_part(part, loaded[str(index)], step=numbers["step"])
    for group, saved in zip(optimizer.param_groups, numbers["param_groups"], strict=True):
        group.update(saved)
    optimizer.push_settings()


@torch.no_grad()
def _restore_part(part: Any, loaded: dict[str, Any], *, step: float) -> None:
    if part.is_stub_optimizer:
        return
    inner: Optimizer = part.optimizer
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    for number, moments in loaded["moments"].items():
        state = inner.state[parameters[int(number)]]
        for name, value in moments.items():
            state[name].copy_(value)
        if step and isinstance(inner, torch.optim.AdamW):
            state["step"] = torch.tensor(step, dtype=torch.float32)
    for group in inner.param_groups:
        if "step" in group:
            group["step"] = int(step)
    for mains, values in zip(
        part.fp32_from_float16_groups if "fp32" in loaded else [], loaded.get("fp32", []), strict=True
    ):
        for main, value in zip(mains, values, strict=True):
            main.copy_(value)
