"""GRPO with the real vLLM in every rank: the numbers agree over layouts, and each sync reaches the sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import Recorder, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import RLCheckpoint, VLLMRollout

STEPS = 4


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), family="llama", tied=request.param)


def _fit(
    root: Path, model: Path, strategy: str, devices: int, *, steps: int = STEPS, ckpt_path: str | None = None
) -> dict[str, Any]:
    recorder = Recorder()
    rollout = VLLMRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64, max_num_seqs=16, kv_cache_bytes=16 << 20)
    trainer = toy_trainer(
        root,
        callbacks=[recorder, RLCheckpoint(every_n_rl_steps=2)],
        rollout=rollout,
        strategy=strategy,
        devices=devices,
    )
    module = toy_module(model, max_rl_steps=steps)
    trainer.fit(module, toy_data(), ckpt_path=ckpt_path)
    return {"steps": recorder.steps, "global_step": trainer.global_step}


def _run(root: Path, model: Path, strategy: str, devices: int, **settings: Any) -> list[dict[str, Any]]:
    return run_distributed(
        _fit, devices, root, model, strategy, devices, init_process_group=False, timeout=240.0, **settings
    )


def test_one_plain_process_and_two_fsdp2_ranks_run_the_same_job(tmp_path: Path, directory: Path) -> None:
    (plain,) = _run(tmp_path / "plain", directory, "auto", 1)
    ranks = _run(tmp_path / "ranks", directory, "fsdp2_rl", 2)
    for index, step in enumerate(plain["steps"]):
        # request seeds do not depend on the layout: the same ids, dealt to ranks in order
        assert [token for rank in ranks for token in rank["steps"][index]["tokens"]] == step["tokens"], index
        assert step["versions"] == [index]
        # sampled with the weights that the trainer has now: the last sync arrived whole (D04, D05)
        assert step["metrics"]["actor/mismatch_abs_max"] < 1e-5
        assert step["metrics"]["sync/tensors_compared"] > 0
        for rank in ranks:
            for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
                assert rank["steps"][index]["metrics"][name] == pytest.approx(step["metrics"][name], abs=1e-5), name


def test_f08_a_resumed_run_samples_from_the_restored_weights(tmp_path: Path, directory: Path) -> None:
    (unbroken,) = _run(tmp_path / "unbroken", directory, "fsdp2_rl", 1)
    _run(tmp_path / "stopped", directory, "fsdp2_rl", 1, steps=2)
    (resumed,) = _run(tmp_path / "stopped", directory, "fsdp2_rl", 1, ckpt_path="last")
    assert [step["rl_step"] for step in resumed["steps"]] == [3, 4]
    assert resumed["steps"] == unbroken["steps"][2:]
