"""Whether a strategy's sizes fit the processes and the model, from the configuration and ``config.json`` alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

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
    given = {
        key.removeprefix(_PREFIX).removesuffix(_SUFFIX): value
        for key, value in values.items()
        if key.startswith(_PREFIX) and key.endswith(_SUFFIX) and (isinstance(value, int) or value == "auto")
    }
    return resolve_sizes(given, world_size=processes) if given else {}


def layout_problems(values: Mapping[str, Any], model: str) -> list[str]:
    """One line for each thing that cannot work: sizes against processes, and sequence ranks against heads.

    Args:
        values: as for ``world_size``.
        model: a directory or id; only a directory's ``config.json`` is read.
    """
    processes = world_size(values)
    if processes is None:
        return []  # the strategy checks the same once it knows
    try:
        sizes = mesh_sizes(values, processes)
    except ValueError as error:
        return [f"strategy: {error}"]
    return _head_problems(sizes.get("sp", 1), Path(model) / "config.json")


def _head_problems(sp_size: int, file: Path) -> list[str]:
    if sp_size == 1 or not file.is_file():
        return []
    from lightning_rlhf.engines.sequence_parallel import check_heads

    numbers = json.loads(file.read_text(encoding="utf-8"))
    numbers = numbers.get("text_config", numbers)
    num_heads = numbers.get("num_attention_heads")
    if not isinstance(num_heads, int):
        return []
    try:
        check_heads(num_heads=num_heads, num_kv_heads=numbers.get("num_key_value_heads") or num_heads, sp_size=sp_size)
    except ValueError as error:
        return [f"strategy.sp_size: {error}"]
    return []
