"""From ``fsdp2_rl`` and ``dp_shard=2,sp=2`` to a strategy that Lightning knows by that name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlhf.strategies.base import RLStrategy
from lightning_rlhf.strategies.register import register_strategies


def parse_layout(text: str) -> dict[str, int]:
    """Axis name to size.

    Args:
        text: ``axis=size`` pairs with commas between them.

    Raises:
        ValueError: if a pair cannot be read, an axis comes twice, or a size is below 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if not axis or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--layout: cannot read {part!r}; expected axis=size pairs such as dp_shard=2,sp=2.")
        if axis in sizes:
            raise ValueError(f"--layout: {axis} is given twice.")
        sizes[axis] = int(size)
    return sizes


def world_size(name: str, layout: Mapping[str, int]) -> int:
    """Processes that a layout of the strategy registered under ``name`` takes.

    Raises:
        ValueError: as ``build_strategy``.
    """
    return _known(name, layout).processes_of(layout)


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Argument name to value.

    Args:
        texts: ``name=value``, the value as JSON or else a word.

    Raises:
        ValueError: if one cannot be read.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip().isidentifier():
            raise ValueError(f"--option: cannot read {text!r}; expected name=value such as distributed_optimizer=true.")
        try:
            options[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            options[name.strip()] = value.strip()
    return options


def build_strategy(
    name: str,
    layout: Mapping[str, int],
    *,
    options: Mapping[str, Any] | None = None,
    timeout_seconds: float = 600.0,
) -> RLStrategy:
    """The strategy registered under ``name``, with the layout's sizes.

    Args:
        name: such as ``fsdp2_rl``.
        layout: axis to size.
        options: further arguments of the strategy, by name.
        timeout_seconds: how long a collective may wait for a peer.

    Raises:
        ValueError: for a name that no RL strategy has, or an axis, a size or an option that it does not take.
    """
    kind = _known(name, layout)
    arguments = {**kind.arguments_of(layout), **(options or {})}
    known = inspect.signature(kind).parameters
    unknown = [option for option in arguments if option not in known]
    if unknown:
        raise ValueError(f"--option: {name} has no argument {', '.join(unknown)}; it has {', '.join(known)}.")
    strategy: RLStrategy = StrategyRegistry[name]["strategy"](**arguments, timeout_seconds=timeout_seconds)
    return strategy


def _known(name: str, layout: Mapping[str, int]) -> type[RLStrategy]:
    register_strategies()
    known = sorted(entry for entry in StrategyRegistry if str(entry).endswith("_rl"))
    if name not in known:
        raise ValueError(f"--strategy: {name} is not available yet. There is {', '.join(known)}.")
    default = StrategyRegistry.get(name)
    if not isinstance(default, RLStrategy):
        raise ValueError(f"--strategy: {name} is a {type(default).__name__}, not an RL strategy with engines.")
    axes = type(default).axis_arguments()
    unknown = [axis for axis in layout if axis not in axes]
    if unknown:
        raise ValueError(f"--layout: {name} has no axis {', '.join(unknown)}; it has {', '.join(axes)}.")
    return type(default)
