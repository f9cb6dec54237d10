"""Replicas of a tiny model, and weights for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.rollout.replica_process import ReplicaConfig
from lightning_rlhf.rollout.served import ServedRolloutEngine
from support.rollout import perturb
from support.tiny import tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def config(path: Path, **changes: Any) -> ReplicaConfig:
    """How a replica is built, small and with one thread."""
    arguments: dict[str, Any] = {
        "model": str(path),
        "max_model_len": 256,
        "kv_cache_bytes": 32 << 20,
        "max_num_seqs": 32,
        "num_threads": 1,
    }
    return ReplicaConfig(**{**arguments, **changes})


def push(engine: ServedRolloutEngine, model: PreTrainedModel, *, version: int) -> None:
    """In the manager's order."""
    engine.pause()
    engine.weight_version = None
    engine.load_weights(iter(model.state_dict().items()))
    engine.resume()
    engine.weight_version = version


def fresh(engine: ServedRolloutEngine, *, seed: int, version: int) -> PreTrainedModel:
    """New weights in all replicas; the model that has them, too."""
    model = tiny_model(tied=True).eval()
    perturb(model, seed=seed, scale=0.3)
    push(engine, model, version=version)
    return model


def tokens_generated(engine: ServedRolloutEngine) -> int:
    """By all replicas since they were started."""
    return sum(engine._wait(replica.client.health()).generated for replica in engine.pool.replicas)
