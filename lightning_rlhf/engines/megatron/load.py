"""Fill megatron's parameters from Hugging Face weights; a rank reads only the ranges that it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_rlhf.engines.megatron.families import ModelShape, model_shape
from lightning_rlhf.engines.megatron.names import (
    HEAD,
    VALUE_HEAD,
    Parameter,
    Piece,
    hf_shapes,
    is_known_hf_name,
    local_parameters,
    look_up,
    pieces,
)


class WeightSource(Protocol):
    """Where weights come from, by their Hugging Face names."""

    def names(self) -> set[str]:
        """Of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        ...

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """The range ``start`` to ``stop`` of one tensor along ``dim`` (0 or 1)."""
        ...


class SafetensorsSource:
    """A Hugging Face directory; reads ranges from its files without loading whole tensors.

    Args:
        directory: holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names.

    Raises:
        FileNotFoundError: if there is neither.
    """

    def __init__(self, directory: Path) -> None:
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        self._files: dict[Path, Any] = {}
        if index.exists():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            self._paths = {name: directory / file for name, file in weight_map.items()}
        elif single.exists():
            with safe_open(single, framework="pt") as file:
                self._paths = dict.fromkeys(file.keys(), single)
        else:
            raise FileNotFoundError(
                f"{directory} holds neither model.safetensors nor model.safetensors.index.json. The megatron back end "
                f"reads safetensors alone; save the model again with save_pretrained."
            )

    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._paths)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """See ``WeightSource``."""
        found = self._slice(name)
        part: Tensor = found[start:stop] if dim == 0 else found[:, start:stop]
        return part

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return tuple(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        path = self._paths[name]
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path].get_slice(name)


class StateDictSource:
    """Tensors in memory.

    Args:
        tensors: by the names that a checkpoint on disk has.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._tensors)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """See ``WeightSource``."""
        return self._tensors[name].detach().narrow(dim, start, stop - start)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return tuple(self._tensors[name].shape)

    @classmethod
    def of_model(cls, model: Any) -> StateDictSource:
        """The weights of a transformers model under the names that it would be saved with."""
        return cls(disk_names(model, {name: tensor.detach() for name, tensor in model.state_dict().items()}))


def disk_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and split tensors of a transformers model (weights, gradients) as ``save_pretrained`` would.

    In memory transformers keeps all experts of a layer in one tensor; on disk each has its own.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


@torch.no_grad()
def load_parameters(chunks: Sequence[nn.Module], source: WeightSource, *, hf_config: Any) -> None:
    """Fill every parameter of this rank's chunks.

    A value head keeps what it has where the source has none (it starts at zero). Rows beyond the vocabulary become
    zero. Call it before the model is wrapped, and have an optimizer that exists read the parameters again.

    Args:
        chunks: of ``build_model``.
        source: of the weights.
        hf_config: of the model.

    Raises:
        ValueError: if a tensor is missing, has another shape, or is there but belongs nowhere.
    """
    shape = model_shape(hf_config)
    names = source.names()
    _check_names(names, shape)
    for name, parameter in local_named(chunks, shape).items():
        place = look_up(name, shape)
        if place.hf_names == (VALUE_HEAD,) and VALUE_HEAD not in names:
            continue
        missing = [hf_name for hf_name in place.hf_names if hf_name not in names]
        if missing:
            raise ValueError(f"The weights lack {', '.join(missing)}, which megatron's {name} is made of.")
        rank, size = _place_of_rank(is_expert=place.is_expert)
        _check_shapes(name, place, parameter.shape, source, shape, size=size)
        parts = [
            (piece, source.read(place.hf_names[piece.hf_index], piece.dim, piece.start, piece.stop))
            for piece in pieces(place.kind, parameter.shape, shape, rank=rank)
        ]
        _fill(parameter, parts)


def _place_of_rank(*, is_expert: bool) -> tuple[int, int]:
    """This rank among those that a parameter is cut over, and how many they are."""
    from megatron.core import parallel_state

    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def local_named(chunks: Sequence[nn.Module], shape: ModelShape) -> dict[str, Any]:
    """This rank's parameters by global name, in the groups in place."""
    from megatron.core import parallel_state

    experts = 0 if shape.moe is None else shape.moe.num_experts
    return local_parameters(
        chunks,
        num_local_experts=experts // parallel_state.get_expert_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
    )


def _fill(parameter: Tensor, parts: Sequence[tuple[Piece, Tensor]]) -> None:
    """Put the pieces one after another; what none of them fills is the vocabulary's padding."""
    dim = parts[0][0].dim if parts else 0
    filled = 0
    for _, part in parts:
        parameter.narrow(dim, filled, part.shape[dim]).copy_(part)
        filled += part.shape[dim]
    parameter.narrow(dim, filled, parameter.shape[dim] - filled).zero_()


def _check_shapes(
    name: str, place: Parameter, local_shape: Sequence[int], source: WeightSource, shape: ModelShape, *, size: int
) -> None:
    for hf_name, expected in zip(place.hf_names, hf_shapes(place.kind, local_shape, shape, size=size), strict=True):
        if source.shape(hf_name) != expected:
            raise ValueError(
                f"{hf_name} has the shape {source.shape(hf_name)}, but megatron's {name} is made of {expected}: the "
                f"weights and the model's config do not belong together."
            )


def _check_names(names: set[str], shape: ModelShape) -> None:
    left_out = tuple(f"model.layers.{shape.num_layers + layer}." for layer in range(shape.extra_layers))
    unread = sorted(
        name
        for name in names
        if not is_known_hf_name(name, shape)
        and name != HEAD
        and not name.endswith("rotary_emb.inv_freq")
        and not name.startswith(left_out)
    )
    if unread:
        raise ValueError(
            f"The weights hold {len(unread)} tensors that a {shape.model_type} of this back end has no place for: "
            f"{', '.join(unread[:5])}. Nothing was dropped silently; train this model with strategy 'fsdp2_rl'."
        )
