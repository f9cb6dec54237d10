"""Weight sync: checkpoint engines that carry tensors, and the manager that runs the protocol."""

from __future__ import annotations

from lightning_rlhf.weights.manager import CheckpointEngineManager
from lightning_rlhf.weights.naive import NaiveCheckpointEngine

__all__ = ["CheckpointEngineManager", "NaiveCheckpointEngine"]
