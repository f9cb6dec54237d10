"""A model built without its weights, and filled shard by shard: no rank holds, or reads, more than its own part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def stored_weights(model: str | Path | nn.Module) -> dict[str, Path]:
    """The file of each weight in a Hugging Face directory of safetensors; empty for anything else."""
    if isinstance(model, nn.Module) or not Path(model).is_dir():
        return {}
    folder = Path(model)
    if (folder / _INDEX).is_file():
        weight_map: dict[str, str] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    if not (folder / _FILE).is_file():
        return {}
    with safe_open(folder / _FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _FILE)


def empty_model(model: str | Path | nn.Module) -> PreTrainedModel | None:
    """The model with fp32 parameters on the meta device and its buffers computed; None if it has to be loaded whole.

    That is so unless ``model`` is a directory of safetensors under the very names and shapes of the model's parameters
    (transformers stores some, fused experts among them, in another form), all its other state is computed from the
    config alone, and all its parameters belong to linear layers, embeddings and the like, which FSDP cuts.
    """
    files = stored_weights(model)
    if not files:
        return None
    config = AutoConfig.from_pretrained(str(model))
    with torch.device("meta"):
        empty: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    empty.tie_weights()
    for name, parameter in empty.named_parameters():
        if name not in files or _stored_shape(files[name], name) != tuple(parameter.shape):
            return None
    return empty if _compute_buffers(empty) else None


@torch.no_grad()
def fill_shards(model: nn.Module, hf_model: nn.Module, path: str | Path, *, device: torch.device) -> None:
    """Gives each parameter on the meta device this rank's part of it, in fp32, read as a slice of its file.

    Args:
        model: the root that is sharded.
        hf_model: within it, with parameters under Hugging Face names.
        path: the directory that ``empty_model`` took.
        device: where the parts go.
    """
    files = stored_weights(path)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                owners.setdefault(id(parameter), []).append((module, key))
    for name, parameter in hf_model.named_parameters():
        places = owners.get(id(parameter))
        if places is None:  # made on the host: a value head, an adapter
            continue
        stored = name.replace(".base_layer.", ".")
        with safe_open(files[stored], framework="pt") as file:  # closed each time: its pages are not kept
            filled = _filled(parameter, file.get_slice(stored), device)
        for module, key in places:  # a tied weight has two
            module._parameters[key] = filled


def _filled(parameter: nn.Parameter, stored: Any, device: torch.device) -> nn.Parameter:
    start, stop = _rows(parameter)
    # a copy, also where the file is fp32: the slice may be a view of the file
    local: Tensor = stored[start:stop].to(device=device, dtype=torch.float32, copy=True)
    if isinstance(parameter, DTensor):
        whole: Tensor = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        whole = local
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _rows(parameter: Tensor) -> tuple[int, int]:
    """The rows that this rank holds: FSDP2 cuts the first dimension as ``torch.chunk`` does."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    start, stop = 0, parameter.shape[0]
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            if placement.dim != 0:
                raise NotImplementedError(f"A parameter is cut along dimension {placement.dim}; rows are read here.")
            step = -(-(stop - start) // parameter.device_mesh.size(axis))
            start = min(start + parameter.device_mesh.get_local_rank(axis) * step, stop)
            stop = min(start + step, stop)
    return start, stop


def _stored_shape(file: Path, name: str) -> tuple[int, ...]:
    with safe_open(file, framework="pt") as opened:
        return tuple(opened.get_slice(name).get_shape())


def _compute_buffers(model: Any) -> bool:
    """Computes on the host what is not stored, as transformers does when it loads; whether all of it could be."""
    non_persistent = dict(model.named_non_persistent_buffers())
    if non_persistent.keys() != dict(model.named_buffers()).keys():
        return False
    owners = {name.rpartition(".")[0] for name in non_persistent}
    for owner in owners:
        module = model.get_submodule(owner)
        if any(True for _ in module.parameters(recurse=False)):
            return False
        for key, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point():
                return False
            module._buffers[key] = torch.full_like(buffer, torch.nan, device="cpu")
        with torch.no_grad():
            model._init_weights(module)
        if any(bool(buffer.isnan().any()) for buffer in module.buffers(recurse=False)):
            return False
    return True
