"""Pushes that replicas take while the next step computes."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import Recorder, toy_data, toy_module, toy_trainer
from support.versions import VersionCheck

from lightning_rlhf.callbacks import VLLMRollout, WeightSync
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.data import ListPrompts, PromptDataModule

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

SLOW_SECONDS = 1.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), family="llama", tied=True)


class SlowPushes(RLCallback):
    """Makes each send last a second, and can kill the first replica in one; notes whether steps waited for theirs."""

    def __init__(self, *, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.waited: list[bool] = []
        self.killed = 0
        self._one_at_a_time = threading.Lock()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        (sync,) = [one for one in trainer.callbacks if isinstance(one, WeightSync)]  # type: ignore[attr-defined]
        carrier = sync.checkpoint_engine
        if "send_weights" in vars(carrier):
            return
        send = carrier.send_weights

        def slowly(named_tensors: Iterator[Any]) -> None:
            assert self._one_at_a_time.acquire(blocking=False), "a push began within another"
            try:
                time.sleep(SLOW_SECONDS)
                if pl_module.rl_step == self.kill_at and not self.killed:
                    self.killed = _kill_first_replica(trainer)
                send(named_tensors)
            finally:
                self._one_at_a_time.release()

        carrier.send_weights = slowly  # type: ignore[method-assign]

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        (sync,) = [one for one in trainer.callbacks if isinstance(one, WeightSync)]  # type: ignore[attr-defined]
        if sync.every == "rollout":
            return
        assert sync._under_way is not None
        self.waited.append(sync._under_way._done.done())


def _kill_first_replica(trainer: pl.Trainer) -> int:
    (rollout,) = [one for one in trainer.callbacks if isinstance(one, VLLMRollout)]  # type: ignore[attr-defined]
    pid = rollout.engine._fleet.pids[0]  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    return pid


def _fit(
    root: Path, model: Path, devices: int, every: Any, kill_at: int | None, new_tokens: int = 24, **module: Any
) -> dict[str, Any]:
    recorder, check, slow = Recorder(), VersionCheck(model), SlowPushes(kill_at=kill_at)
    rollout = VLLMRollout(
        mode="server",
        server={"threads": 1},
        max_staleness=1,
        num_rollouts=4,
        max_new_tokens=new_tokens,
        max_model_len=64,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
    )
    sync = WeightSync(every=every, engine="shm", overlap=True)
    trainer = toy_trainer(
        root,
        callbacks=[recorder, check, sync, slow],
        rollout=rollout,
        weight_sync=False,
        strategy="fsdp2_rl",
        devices=devices,
    )
    try:
        data = PromptDataModule(ListPrompts([f"{i} + {i + 1} =" for i in range(24)]), prompts_per_step=4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", "A replica was lost in a push")
            trainer.fit(toy_module(model, max_rl_steps=4, **module), data)
        assert sync._under_way is None
        assert sync.last_receipt is not None
        return {
            "steps": recorder.steps,
            "worst": check.worst,
            "ages": check.ages,
            "trained": [uid for step in recorder.steps for uid in step["uids"]],
            "pushed": sync.last_receipt.version,
            "waited": slow.waited,
            "killed": slow.killed,
            "warned": " ".join(str(one.message) for one in caught),
        }
    finally:
        rollout.shutdown()


def _run(*arguments: Any, devices: int = 1, **more: Any) -> list[dict[str, Any]]:
    root, model, *rest = arguments
    return run_distributed(_fit, devices, root, model, devices, *rest, init_process_group=False, timeout=240, **more)


@pytest.mark.parametrize(
    ("devices", "every"),
    [(1, "optimizer_step"), (2, "optimizer_step"), pytest.param(1, "rollout", marks=pytest.mark.slow)],
)
def test_every_token_is_of_the_weights_that_it_names(tmp_path: Path, directory: Path, devices: int, every: str) -> None:
    ranks = _run(tmp_path, directory, every, None, devices=devices)
    assert max(rank["worst"] for rank in ranks) < 1e-5
    assert set().union(*(rank["ages"] for rank in ranks)) <= {0, 1}
    trained = [uid for rank in ranks for uid in rank["trained"]]
    assert len(trained) == len(set(trained)) == 16
    assert not any(ranks[0]["waited"]), "a push was waited for"
    for rank in ranks:
        assert rank["pushed"] == (4 if every == "optimizer_step" else 3)
        assert [step["metrics"].get("sync/probe_difference", 0.0) < 1e-4 for step in rank["steps"]] == [True] * 4


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_that_needs_responses_waits_for_the_push(tmp_path: Path, directory: Path, devices: int) -> None:
    """Its groups are half-way when the push begins; greedy baselines are asked for after it."""
    ranks = _run(tmp_path, directory, "optimizer_step", None, devices=devices, new_tokens=50, advantage="remax")
    assert max(rank["worst"] for rank in ranks) < 1e-5
    assert set().union(*(rank["ages"] for rank in ranks)) <= {0, 1}
    trained = [uid for rank in ranks for uid in rank["trained"]]
    assert len(trained) == len(set(trained)) == 16


def test_a_replica_that_dies_in_a_push_gets_the_weights_with_the_next(tmp_path: Path, directory: Path) -> None:
    (found,) = _run(tmp_path, directory, "optimizer_step", 1)
    assert found["killed"]
    assert "A replica was lost in a push" in found["warned"]
    assert found["worst"] < 1e-5
    assert found["ages"] <= {0, 1}
    assert len(found["trained"]) == len(set(found["trained"])) == 16
    assert found["pushed"] == 4


def test_overlap_where_it_cannot_help_is_refused(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(ValueError, match=r"engine='naive', overlap=True.*engine='shm'"):
        WeightSync(overlap=True)
    trainer = toy_trainer(
        tmp_path,
        callbacks=[WeightSync(engine="shm", overlap=True)],
        rollout=VLLMRollout(mode="server"),
        weight_sync=False,
    )
    with pytest.raises(ValueError, match=r"gains nothing .*max_staleness"):
        trainer.fit(toy_module(directory, max_rl_steps=1), toy_data())
