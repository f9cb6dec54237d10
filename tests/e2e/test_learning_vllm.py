"""GRPO learns a toy task end to end from its experiment file, with the real vLLM sampling."""

from __future__ import annotations

import statistics
from pathlib import Path

from support.fork import run_distributed
from support.learning import rise, run_experiment
from support.tiny import write_tiny_model

STEPS = 20


def _fit(root: Path, model: Path) -> list[dict[str, float]]:
    changes = ["rollout=vllm", "rollout.kv_cache_bytes=16777216", "rollout.max_num_seqs=16"]
    return run_experiment("grpo-tiny-1n1r-auto", root, model, *changes, steps=STEPS)


def test_grpo_learns_with_vllm(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", family="llama")
    (metrics,) = run_distributed(_fit, 1, tmp_path, model, init_process_group=False, timeout=250.0)
    rewards = [step["reward/mean"] for step in metrics]
    difference, in_errors = rise(rewards)
    assert difference > 0.3
    assert in_errors > 3.0
    assert statistics.mean(rewards[-5:]) > 0.85
    # each of its optimizer steps has reached the sampler
    assert max(step["actor/mismatch_abs_max"] for step in metrics) < 1e-2
    assert all(step["sync/tensors_compared"] > 0 for step in metrics)
