"""GRPO under megatron_rl with the real vLLM in every rank: FSDP2's samples, and FSDP2's training of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fork import run_distributed
from support.replay import ReplayRollout, RolloutRecorder, joined, samples_of
from support.tiny import write_tiny_model
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import VLLMRollout
from lightning_rlhf.strategies import FSDP2RLStrategy, MegatronRLStrategy
from lightning_rlhf.types import Rollouts

STEPS = 5
SAMPLING: dict[str, Any] = {"num_rollouts": 4, "max_new_tokens": 8, "max_model_len": 64}


def _fit(root: Path, model: Path, strategy: Any, steps: int, replay: Sequence[Rollouts] = ()) -> dict[str, Any]:
    recorder, rollouts = Recorder(), RolloutRecorder()
    vllm = {"max_num_seqs": 16, "kv_cache_bytes": 16 << 20}
    rollout = ReplayRollout(replay, **SAMPLING) if replay else VLLMRollout(**SAMPLING, **vllm)  # type: ignore[arg-type]
    trainer = toy_trainer(root, callbacks=[recorder, rollouts], rollout=rollout, strategy=strategy, devices=2)
    grpo = toy_module(model, max_rl_steps=steps)
    trainer.fit(grpo, toy_data())
    parameters = {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()}
    return {"steps": recorder.steps, "rollouts": rollouts.rollouts, "parameters": parameters}


def _ranks(*arguments: Any) -> list[dict[str, Any]]:
    return run_distributed(_fit, 2, *arguments, init_process_group=False, timeout=280.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("vllm") / "tiny", family="llama")


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    ranks = _ranks(tmp_path_factory.mktemp("fsdp2"), model, FSDP2RLStrategy(), STEPS)
    return {**ranks[0], "rollouts": joined([rank["rollouts"] for rank in ranks])}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tensor_parallel_size": 2}, id="tp2"),
        # its replay is in the quick tests as well, without vLLM
        pytest.param({"pipeline_parallel_size": 2}, id="pp2", marks=pytest.mark.slow),
    ],
)
def test_samples_and_updates_are_those_of_fsdp2(
    tmp_path: Path, model: Path, fsdp2: dict[str, Any], sizes: dict[str, int]
) -> None:
    strategy = MegatronRLStrategy(**sizes)  # type: ignore[arg-type]
    for result in _ranks(tmp_path, model, strategy, 2):
        # request seeds do not depend on the layout, and each rank has sampled a share
        assert samples_of(result["rollouts"][0]) == samples_of(fsdp2["rollouts"][0])
        for step in result["steps"]:  # vLLM has the weights that the trainer has now
            assert step["metrics"]["actor/mismatch_abs_max"] < 1e-5
    for result in _ranks(tmp_path, model, strategy, STEPS, fsdp2["rollouts"]):
        for mine, theirs in zip(result["steps"], fsdp2["steps"], strict=True):
            for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
                assert mine["metrics"][name] == pytest.approx(theirs["metrics"][name], abs=1e-4), name
        for name, value in fsdp2["parameters"].items():
            np.testing.assert_allclose(result["parameters"][name], value, atol=1e-4, rtol=0, err_msg=name)
