"""Weight sync: checkpoint engines that carry tensors, and the manager that runs the protocol."""

from __future__ import annotations

from lightning_rlhf.weights.channel import PeerError
from lightning_rlhf.weights.delta import DeltaCheckpointEngine
from lightning_rlhf.weights.disk import DiskCheckpointEngine
from lightning_rlhf.weights.kimi import KimiCheckpointEngine
from lightning_rlhf.weights.manager import CheckpointEngineManager
from lightning_rlhf.weights.mooncake import MooncakeCheckpointEngine
from lightning_rlhf.weights.naive import NaiveCheckpointEngine
from lightning_rlhf.weights.nccl import NCCLCheckpointEngine
from lightning_rlhf.weights.nixl import NIXLCheckpointEngine
from lightning_rlhf.weights.shm import ShmCheckpointEngine

__all__ = [
    "CheckpointEngineManager",
    "DeltaCheckpointEngine",
    "DiskCheckpointEngine",
    "KimiCheckpointEngine",
    "MooncakeCheckpointEngine",
    "NCCLCheckpointEngine",
    "NIXLCheckpointEngine",
    "NaiveCheckpointEngine",
    "PeerError",
    "ShmCheckpointEngine",
]
