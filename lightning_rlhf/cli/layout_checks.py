"""Whether a strategy's sizes fit the processes and the model, from the configuration and ``config.json`` alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import ListConfig
from transformers import PretrainedConfig

from lightning_rlhf.callbacks.vllm_layout import check_heads as check_heads_of_vllm
from lightning_rlhf.callbacks.vllm_layout import check_processes
from lightning_rlhf.cli.architectures import model_config
from lightning_rlhf.engines.megatron.layout import MegatronLayout, check_layout, check_world
from lightning_rlhf.strategies.mesh import resolve_sizes

_PREFIX, _SUFFIX = "strategy.", "_size"


def world_size(values: Mapping[str, Any]) -> int | None:
    """Processes that the Trainer will start, or None if only the machine can say.

    Args:
        values: every key with its value or default, as ``validate`` returns them.
    """
    devices, nodes = values.get("trainer.devices"), values.get("trainer.num_nodes", 1)
    if isinstance(devices, ListConfig):
        devices = len(devices)
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    if devices == "auto" and values.get("trainer.accelerator") == "cpu":
        devices = 1
    return devices * int(nodes) if isinstance(devices, int) and devices > 0 else None


def mesh_sizes(values: Mapping[str, Any], processes: int) -> dict[str, int]:
    """The strategy's axes with their sizes; empty for a strategy without any.

    Args:
        values: as for ``world_size``.
        processes: the world size.

    Raises:
        ValueError: if the sizes do not multiply to it.
    """
    if f"{_PREFIX}tensor_parallel_size" in values:
        return _megatron_sizes(megatron_layout(values), processes)
    given = {
        key.removeprefix(_PREFIX).removesuffix(_SUFFIX): value
        for key, value in values.items()
        if key.startswith(_PREFIX) and key.endswith(_SUFFIX) and (isinstance(value, int) or value == "auto")
    }
    return resolve_sizes(given, world_size=processes) if given else {}


def megatron_layout(values: Mapping[str, Any]) -> MegatronLayout:
    """The sizes of ``megatron_rl``; ``values`` as for ``world_size``."""
    names = [spec.name for spec in dataclasses.fields(MegatronLayout)]
    return MegatronLayout(**{name: values[_PREFIX + name] for name in names if _PREFIX + name in values})


def _megatron_sizes(layout: MegatronLayout, processes: int) -> dict[str, int]:
    """Axes that multiply to the processes; experts are shared out over the same ranks."""
    check_world(layout, processes)
    return {
        "pp": layout.pipeline_parallel_size,
        "dp": processes // layout.model_parallel_size,
        "cp": layout.context_parallel_size,
        "tp": layout.tensor_parallel_size,
    }


def layout_problems(values: Mapping[str, Any], model: str) -> list[str]:
    """One line for each thing that cannot work: sizes against processes, and against the model's heads.

    Args:
        values: as for ``world_size``.
        model: a directory or id, whose configuration is read where it can be had without a network.
    """
    processes = world_size(values)
    if processes is None:
        return []  # the strategy checks the same once it knows
    try:
        sizes = mesh_sizes(values, processes)
        if f"{_PREFIX}tensor_parallel_size" in values:
            config = _text_config(model)
            if config is not None:
                check_layout(megatron_layout(values), config, processes)
    except ValueError as error:
        return [f"strategy: {error}"]
    heads = [] if sizes.get("sp", 1) == 1 else _head_problems(sizes["sp"], model)
    return heads + _rollout_problems(values, model, processes)


def _rollout_problems(values: Mapping[str, Any], model: str, processes: int) -> list[str]:
    """Of a vLLM model that training processes share."""
    sharers, nodes = int(values.get("rollout.tensor_parallel_size", 1)), int(values.get("trainer.num_nodes", 1))
    if values.get("rollout.mode") != "colocated" or sharers == 1:
        return []
    numbers = _numbers(model)
    num_heads = numbers.get("num_attention_heads")
    try:
        check_processes(sharers, num_nodes=nodes, processes_per_node=processes // nodes)
        if isinstance(num_heads, int):
            num_kv_heads = numbers.get("num_key_value_heads") or num_heads
            check_heads_of_vllm(sharers, num_heads=num_heads, num_kv_heads=num_kv_heads)
    except ValueError as error:
        return [f"rollout.tensor_parallel_size: {error}"]
    return []


def _text_config(model: str) -> PretrainedConfig | None:
    """Of the language model; None where it cannot be had here, and the run itself checks."""
    try:
        return model_config(model).get_text_config()
    except (OSError, ValueError):
        return None


def _numbers(model: str) -> dict[str, Any]:
    """What the configuration says, also of a kind of model that transformers does not know."""
    file = Path(model) / "config.json"
    if file.is_file():
        numbers: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        text: dict[str, Any] = numbers.get("text_config", numbers)
        return text
    config = _text_config(model)
    return {} if config is None else config.to_dict()


def _head_problems(sp_size: int, model: str) -> list[str]:
    from lightning_rlhf.engines.sequence_parallel import check_heads

    numbers = _numbers(model)
    num_heads = numbers.get("num_attention_heads")
    if not isinstance(num_heads, int):
        return []
    try:
        check_heads(num_heads=num_heads, num_kv_heads=numbers.get("num_key_value_heads") or num_heads, sp_size=sp_size)
    except ValueError as error:
        return [f"strategy.sp_size: {error}"]
    return []
