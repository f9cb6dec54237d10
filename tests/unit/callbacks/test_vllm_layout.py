"""A vLLM model shared by training processes: what does not fit is refused from sizes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_model, write_tiny_model
from support.toy import toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import VLLMRollout
from lightning_rlhf.callbacks.vllm_layout import check_vllm_layout
from lightning_rlhf.rollout.vllm import VLLMEngine


@pytest.mark.parametrize(
    ("size", "processes", "message"),
    [
        (2, 1, r"tensor_parallel_size=2\) shares .* this run has 1 process\(es\) on each of 3 node\(s\).*divisor of 1"),
        (4, 6, r"tensor_parallel_size=4\) shares .* has 6 process\(es\).*mode='server', tensor_parallel_size=4"),
        (3, 3, r"tensor_parallel_size=3\) does not fit .* 2 attention heads, and divide its 1 key-value heads"),
    ],
)
def test_sizes_that_do_not_fit_are_named(size: int, processes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_vllm_layout(size, num_nodes=3, processes_per_node=processes, model=tiny_model())


def test_fewer_key_value_heads_than_ranks_are_repeated(tmp_path: Path) -> None:
    check_vllm_layout(2, num_nodes=1, processes_per_node=4, model=write_tiny_model(tmp_path / "tiny"))


def test_a_run_is_refused_before_its_model_is_loaded(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    (model / "model.safetensors").unlink()
    trainer = toy_trainer(tmp_path, rollout=VLLMRollout(tensor_parallel_size=2, max_model_len=64, max_new_tokens=8))
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2\) shares .* this run has 1 process"):
        trainer.fit(toy_module(model), toy_data())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_flight": "resubmit"}, "in_flight=.*mode='server'.*neither .* nor stops between two tokens"),
        ({"max_staleness": 1}, "max_staleness=.*mode='server'.*neither samples beside training"),
        ({"engine_kwargs": {"tensor_parallel_size": 2}}, r"may not hold \['tensor_parallel_size'\]"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
    ],
)
def test_what_ranks_in_step_cannot_do_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMRollout(**{"tensor_parallel_size": 2, **arguments})


def test_an_engine_without_a_process_group_is_refused(tmp_path: Path) -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match=r"tensor_parallel_size=2 cuts .* no process group"):
        VLLMEngine(write_tiny_model(tmp_path / "m"), max_model_len=64, kv_cache_bytes=2**20, tensor_parallel_size=2)
