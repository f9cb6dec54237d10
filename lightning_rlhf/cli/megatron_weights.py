"""A model that megatron-core has saved in parts, read in one process, whatever layout it was trained in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_rlhf.cli.run_records import RecordError
from lightning_rlhf.contracts.engine import EngineConfig


def megatron_weights(folder: Path, *, base: str) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and full tensors of an engine's folder in a checkpoint. The model is held whole meanwhile.

    Args:
        folder: what ``MegatronEngine.save_checkpoint`` wrote.
        base: the model that the run started from, for its configuration; its weights are replaced.

    Raises:
        RecordError: if the folder holds no such model, or this process has a process group already.
    """
    from lightning_rlhf.engines.megatron.engine import MegatronEngine
    from lightning_rlhf.engines.megatron.layout import destroy_groups

    if not (folder / ".metadata").is_file():
        raise RecordError(f"{folder} holds no model of the megatron back end.")
    if dist.is_initialized():
        raise RecordError("A checkpoint of the megatron back end is read by a process of its own, outside any group.")
    from torch._C._distributed_c10d import HashStore

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        engine = MegatronEngine(EngineConfig(model=base, compute_dtype=_dtype_in(folder)), device=device)
        engine.initialize()
        engine.load_checkpoint(folder)
        yield from engine.get_per_tensor_param()
    finally:
        # megatron's first: a process forked from this one would wait for the threads of groups that it inherits
        destroy_groups()
        dist.destroy_process_group()


def _dtype_in(folder: Path) -> torch.dtype:
    """bf16 if any of the stored parameters is: routers are fp32 in either case."""
    from lightning_rlhf.engines.safe_reader import SafeFileSystemReader

    entries = SafeFileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        entry.properties.dtype
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("optimizer.")
    }
    return torch.bfloat16 if torch.bfloat16 in found else torch.float32
