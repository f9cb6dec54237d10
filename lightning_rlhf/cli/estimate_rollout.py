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
    side_by_side: int,
    compute_bytes: int,
    notes: list[str],
) -> dict[str, int]:
    """Bytes of the rollout engine in the same process: its copy of the weights, or share, and its key-value cache.

    Args:
        values: every key with its value or default, as ``validate`` returns them.
        shape: of the model.
        longest: tokens of the longest sequence that the prompts and ``max_new_tokens`` allow.
        side_by_side: rollouts that a process samples.
        compute_bytes: of one element in training.
        notes: takes what a reader has to know.
    """
    reserved = values.get("rollout.kv_cache_bytes")
    is_vllm = isinstance(reserved, int)
    dtype = values.get("rollout.dtype") if is_vllm else "float32"
    element = {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(dtype), compute_bytes if is_vllm else 4)
    sharers = int(values.get("rollout.tensor_parallel_size", 1)) if values.get("rollout.mode") == "colocated" else 1
    # processes that share a model sample the rollouts of all of them, each with its share of the heads
    side_by_side *= sharers
    if is_vllm:
        side_by_side = min(side_by_side, values.get("rollout.max_num_seqs") or side_by_side)
    needed = kv_cache_bytes(shape, tokens=longest * max(side_by_side, 1), element_bytes=element)
    needed //= min(sharers, shape.num_kv_heads)
    if isinstance(reserved, int) and reserved < needed:
        notes.append(
            f"rollout.kv_cache_bytes={reserved} holds fewer than the {max(side_by_side, 1)} responses of {longest} "
            f"tokens that are sampled side by side ({needed} bytes): vLLM will preempt some."
        )
    return {
        "rollout_weights": -(-element * shape.num_parameters // sharers),
        "kv_cache": reserved if isinstance(reserved, int) else needed,
    }
