"""Episodes with the real vLLM: exact log-probs behind observations; per rank and served, the same in each layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import Recorder, toy_data, toy_module, toy_trainer
from support.turns import Dice
from support.vllm_imports import vllm_is_imported  # noqa: F401 (a fixture)

from lightning_rlhf.callbacks import VLLMRollout
from lightning_rlhf.rewards import EnvironmentReward


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), family="llama")


def _fit(root: Path, model: Path, strategy: str, devices: int, **rollout: Any) -> list[dict[str, Any]]:
    recorder = Recorder()
    sampler = VLLMRollout(
        num_rollouts=4, max_new_tokens=6, max_model_len=96, max_num_seqs=16, kv_cache_bytes=16 << 20, stop=("=", "3"),
        environment=Dice, **rollout,
    )  # fmt: skip
    trainer = toy_trainer(root, callbacks=[recorder], rollout=sampler, strategy=strategy, devices=devices)
    trainer.fit(toy_module(model, reward=EnvironmentReward(), max_rl_steps=2), toy_data())
    return recorder.steps


def _run(root: Path, model: Path, strategy: str, devices: int, **rollout: Any) -> list[list[dict[str, Any]]]:
    return run_distributed(
        _fit, devices, root, model, strategy, devices, init_process_group=False, timeout=240.0, **rollout
    )


def test_episodes_are_the_same_in_one_process_on_two_ranks_and_served(tmp_path: Path, directory: Path) -> None:
    (alone,) = _run(tmp_path / "alone", directory, "auto", 1)
    (served,) = _run(tmp_path / "served", directory, "auto", 1, mode="server")
    ranks = _run(tmp_path / "ranks", directory, "fsdp2_rl", 2)
    sharing = _run(tmp_path / "sharing", directory, "fsdp2_rl", 2, tensor_parallel_size=2)
    for index, step in enumerate(alone):
        metrics = step["metrics"]
        assert metrics["rollout/turns_max"] > 1
        assert metrics["rollout/observation_tokens"] > 0
        assert step["versions"] == [index]
        # what vLLM gave each id, behind observations and over its prefix cache, is what the trainer finds there
        assert metrics["actor/mismatch_abs_max"] < 1e-5
        assert served[index]["tokens"] == step["tokens"]
        for two in (ranks, sharing):  # in a group that shares a model one rank's episodes may end before the other's
            assert [token for rank in two for token in rank[index]["tokens"]] == step["tokens"]
        for other in (served, *ranks, *sharing):
            for name in ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/turns_mean"):
                assert other[index]["metrics"][name] == pytest.approx(metrics[name], abs=1e-5), name
