"""Replicas of a tiny model, and weights for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.callbacks import VLLMRollout, WeightSync
from lightning_rlhf.rollout.replica_process import ReplicaConfig
from lightning_rlhf.rollout.served import ServedRolloutEngine
from support.rollout import perturb
from support.tiny import tiny_model
from support.toy import Recorder, toy_data, toy_module, toy_trainer

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


def two_replicas(path: Path) -> ServedRolloutEngine:
    """Which may die more often than a test kills them."""
    return ServedRolloutEngine(
        path,
        max_model_len=256,
        fleet_configs=[config(path, seed=index) for index in range(2)],
        pool_settings={"max_deaths": 10},
    )


def steps_with_two_workers(folder: Path, model: Path, *, strategy: Any, sync: WeightSync) -> list[dict[str, Any]]:
    """What `Recorder` keeps of three RL steps of two trainer ranks, which feed one replica of two workers."""
    recorder = Recorder()
    rollout = VLLMRollout(
        mode="server",
        tensor_parallel_size=2,
        server={"threads": 1},
        num_rollouts=4,
        max_new_tokens=8,
        max_model_len=64,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
    )
    trainer = toy_trainer(
        folder, callbacks=[sync, recorder], rollout=rollout, weight_sync=False, strategy=strategy, devices=2
    )
    try:
        trainer.fit(toy_module(model, max_rl_steps=3), toy_data())
    finally:
        rollout.shutdown()
    return recorder.steps


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
