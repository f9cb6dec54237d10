"""Lightning strategies that launch processes, build the mesh and create the engines."""

from __future__ import annotations

if __name__ != "lightning_rlhf.strategies":
    raise ImportError(
        f"This package was imported as {__name__!r}. Import it as 'lightning_rlhf.strategies': "
        "the folder at the top of the repository is reached through a link inside the package."
    )

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rlhf.strategies.base import RLStrategy
    from lightning_rlhf.strategies.fsdp2 import FSDP2RLStrategy
    from lightning_rlhf.strategies.megatron import MegatronRLStrategy
    from lightning_rlhf.strategies.ulysses import UlyssesRLStrategy

_PUBLIC = {
    "FSDP2RLStrategy": "fsdp2",
    "MegatronRLStrategy": "megatron",
    "RLStrategy": "base",
    "UlyssesRLStrategy": "ulysses",
}

__all__ = ["FSDP2RLStrategy", "MegatronRLStrategy", "RLStrategy", "UlyssesRLStrategy"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
