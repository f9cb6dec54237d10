"""Sizes of a device mesh's axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal


def resolve_sizes(sizes: Mapping[str, int | Literal["auto"]], *, world_size: int) -> dict[str, int]:
    """Fills in at most one ``"auto"`` axis so that the sizes multiply to the world size.

    Args:
        sizes: axis name to number of ranks along it, outermost first.
        world_size: ranks in all.

    Raises:
        ValueError: if they cannot multiply to the world size; names the numbers.
    """
    for axis, size in sizes.items():
        if size != "auto" and size < 1:
            raise ValueError(f"{axis}_size must be at least 1, got {size}.")
    free = [axis for axis, size in sizes.items() if size == "auto"]
    if len(free) > 1:
        raise ValueError(f"Only one axis can be 'auto', got {', '.join(free)}.")
    fixed = math.prod(size for size in sizes.values() if size != "auto")
    product = " x ".join(f"{axis}_size={size}" for axis, size in sizes.items())
    if world_size % fixed or (not free and fixed != world_size):
        raise ValueError(
            f"{product} does not fit {world_size} process(es): the sizes must multiply to devices x num_nodes."
        )
    return {axis: world_size // fixed if size == "auto" else size for axis, size in sizes.items()}
