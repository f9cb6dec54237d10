"""Lightning callbacks: rollout, weight sync, progress and records."""

from __future__ import annotations

if __name__ != "lightning_rlhf.callbacks":
    raise ImportError(
        f"This package was imported as {__name__!r}. Import it as 'lightning_rlhf.callbacks': "
        "the folder at the top of the repository is reached through a link inside the package."
    )

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rlhf.callbacks.checkpoint import RLCheckpoint
    from lightning_rlhf.callbacks.dynamic_sampling import DynamicSampling
    from lightning_rlhf.callbacks.export import HFExport
    from lightning_rlhf.callbacks.progress import RLProgressBar
    from lightning_rlhf.callbacks.report import RunReport
    from lightning_rlhf.callbacks.rollout import HFRollout, RolloutCallback
    from lightning_rlhf.callbacks.rollout_dump import RolloutDump
    from lightning_rlhf.callbacks.samples import SampleTable
    from lightning_rlhf.callbacks.throughput import Throughput
    from lightning_rlhf.callbacks.vllm_rollout import VLLMRollout
    from lightning_rlhf.callbacks.weight_sync import WeightSync

_PUBLIC = {
    "DynamicSampling": "dynamic_sampling",
    "HFExport": "export",
    "HFRollout": "rollout",
    "RLCheckpoint": "checkpoint",
    "RLProgressBar": "progress",
    "RolloutCallback": "rollout",
    "RolloutDump": "rollout_dump",
    "RunReport": "report",
    "SampleTable": "samples",
    "Throughput": "throughput",
    "VLLMRollout": "vllm_rollout",
    "WeightSync": "weight_sync",
}

__all__ = [
    "DynamicSampling",
    "HFExport",
    "HFRollout",
    "RLCheckpoint",
    "RLProgressBar",
    "RolloutCallback",
    "RolloutDump",
    "RunReport",
    "SampleTable",
    "Throughput",
    "VLLMRollout",
    "WeightSync",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
