"""What the rollout engine takes in the training process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_rlhf.cli.estimate import ModelShape, kv_cache_bytes


def rollout_memory(
    values: Mapping[str, Any],
    shape: ModelShape,
    *,
    longest: int,
    rollouts: int,
    processes: int,
    compute_bytes: int,
    notes: list[str],
) -> dict[str, int]:
    """Bytes of the rollout engine in a training process: its copy of the weights, or share, and its key-value cache.

    Replicas are processes of their own, with devices of their own where there are any: a note says what they take.

    Args:
        values: every key with its value or default, as ``validate`` returns them.
        shape: of the model.
        longest: tokens of the longest sequence that the prompts and ``max_new_tokens`` allow.
        rollouts: of an RL step, over all processes.
        processes: of the run.
        compute_bytes: of one element in training.
        notes: takes what a reader has to know.
    """
    reserved = values.get("rollout.kv_cache_bytes")
    is_vllm = isinstance(reserved, int)
    dtype = values.get("rollout.dtype") if is_vllm else "float32"
    element = {"float32": 4, "bfloat16": 2}.get(str(dtype), compute_bytes if is_vllm else 4)
    sharers = int(values.get("rollout.tensor_parallel_size", 1)) if is_vllm else 1
    served = values.get("rollout.mode") == "server"
    # processes that share a model sample the rollouts of all of them, each with its share of the heads
    engines = _replicas(values) if served else max(processes // sharers, 1)
    side_by_side = max(rollouts // engines, 1)
    if is_vllm:
        side_by_side = min(side_by_side, values.get("rollout.max_num_seqs") or side_by_side)
    needed = kv_cache_bytes(shape, tokens=longest * side_by_side, element_bytes=element)
    needed //= min(sharers, shape.num_kv_heads)
    if isinstance(reserved, int) and reserved < needed:
        notes.append(
            f"rollout.kv_cache_bytes={reserved} holds fewer than the {side_by_side} responses of {longest} "
            f"tokens that are sampled side by side ({needed} bytes): vLLM will preempt some."
        )
    weights = -(-element * (shape.num_parameters + _packed_again(values, shape, is_vllm=is_vllm)) // sharers)
    cache = reserved if isinstance(reserved, int) else needed
    if served:
        notes.append(
            f"rollout.mode=server: each of {engines} replica(s) takes {weights + cache} bytes for weights and cache on "
            f"each of its {sharers} device(s); they are no part of a training process's memory."
        )
        return {"rollout_weights": 0, "kv_cache": 0}
    return {"rollout_weights": weights, "kv_cache": cache}


def _replicas(values: Mapping[str, Any]) -> int:
    return len(values.get("rollout.urls") or ()) or int(values.get("rollout.replicas") or 1)


def _packed_again(values: Mapping[str, Any], shape: ModelShape, *, is_vllm: bool) -> int:
    """Parameters that vLLM holds twice: on a CPU a head that is the embedding is packed, and the embedding stays."""
    head = shape.vocab_size * shape.hidden_size
    tied = shape.root_parameters < 2 * head
    return head if is_vllm and tied and values.get("trainer.accelerator") == "cpu" else 0
