"""Dynamic sampling and greedy baselines with the real vLLM: two ranks, also of one vLLM, fill a step as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import Recorder, toy_data, toy_module, toy_trainer
from support.vllm_imports import vllm_is_imported  # noqa: F401 (a fixture)

from lightning_rlhf.callbacks import DynamicSampling, VLLMRollout


def _reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Every second prompt's rewards are all equal; the others' depend on the text alone."""
    even = [int(prompt.split("+")[0].strip(" <>abcdefghijklmnopqrstuvwxyz")) % 2 == 0 for prompt in prompts]
    return [0.0 if flat else sum(map(ord, text)) / 1e3 for text, flat in zip(responses, even, strict=True)]


def _fit(root: Path, model: Path, strategy: str, devices: int, tensor_parallel_size: int = 1) -> list[dict[str, Any]]:
    recorder = Recorder()
    rollout = VLLMRollout(
        num_rollouts=4,
        max_new_tokens=8,
        max_model_len=64,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        tensor_parallel_size=tensor_parallel_size,
        dynamic_sampling=DynamicSampling(),
    )
    trainer = toy_trainer(root, callbacks=[recorder], rollout=rollout, strategy=strategy, devices=devices)
    trainer.fit(toy_module(model, reward=_reward, advantage="remax", max_rl_steps=2), toy_data())
    return recorder.steps


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_two_ranks_fill_the_step_that_one_process_fills(tmp_path: Path, tensor_parallel_size: int) -> None:
    model = write_tiny_model(tmp_path / "model", family="llama")
    (plain,), ranks = (
        run_distributed(_fit, size, tmp_path, model, name, size, share, init_process_group=False, timeout=240.0)
        for name, size, share in (("auto", 1, 1), ("fsdp2_rl", 2, tensor_parallel_size))
    )
    for index, step in enumerate(plain):
        assert sorted(uid for rank in ranks for uid in rank[index]["uids"]) == sorted(step["uids"])
        assert all(int(uid) % 2 for uid in step["uids"])
        assert sorted(t for rank in ranks for t in rank[index]["tokens"]) == sorted(step["tokens"])
        assert step["metrics"]["rollout/dropped_groups"] > 0
        for rank in ranks:
            for name in ("actor/loss", "actor/grad_norm", "rollout/drawn_prompts"):
                assert rank[index]["metrics"][name] == pytest.approx(step["metrics"][name], abs=1e-5), name
