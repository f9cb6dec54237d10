"""The only replica of a trainer of several ranks dies in a rollout, under a checkpoint engine: the run goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import Recorder, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import VLLMRollout, WeightSync
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.rollout.push_rounds import PushRounds
from lightning_rlhf.rollout.served import ServedRolloutEngine

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

STEPS = 3


class KillInRollout(RLCallback):
    """After the first step: the replica is killed a moment after requests have reached it."""

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        (rollout,) = [c for c in trainer.callbacks if isinstance(c, VLLMRollout)]  # type: ignore[attr-defined]
        engine = rollout.engine
        if step.rl_step != 0 or not isinstance(engine, ServedRolloutEngine) or engine._fleet is None:
            return
        send, fleet = engine.pool._send, engine._fleet

        async def send_and_kill(replica: Any, waiting: Any) -> None:
            del engine.pool._send  # type: ignore[misc] # the class's own, for the next request
            asyncio.get_running_loop().call_later(0.02, lambda: os.kill(fleet.pids[0], signal.SIGKILL))
            await send(replica, waiting)

        engine.pool._send = send_and_kill  # type: ignore[method-assign]


def _fit(root: Path, model: Path, **arguments: Any) -> dict[str, Any]:
    recorder = Recorder()
    rollout = VLLMRollout(
        mode="server", server={"threads": 1}, num_rollouts=4, max_new_tokens=16, max_model_len=64, max_num_seqs=16,
        kv_cache_bytes=16 << 20, **arguments,
    )  # fmt: skip
    callbacks = [KillInRollout(), WeightSync(engine="shm"), recorder]
    trainer = toy_trainer(root, callbacks=callbacks, rollout=rollout, weight_sync=False, strategy="fsdp2_rl", devices=2)
    try:
        trainer.fit(toy_module(model, max_rl_steps=STEPS), toy_data())
        assert isinstance(rollout.engine, ServedRolloutEngine)
        pool = rollout.engine.pool
        return {"steps": recorder.steps, "ledger": vars(pool.ledger), "deaths": pool.replicas[0].deaths}
    finally:
        rollout.shutdown()


def test_it_gets_the_weights_from_all_ranks_in_the_middle_of_the_rollout(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", family="llama", tied=True)
    ranks = run_distributed(_fit, 2, tmp_path, model, init_process_group=False, timeout=180.0)
    assert ranks[0]["deaths"] == 1
    assert sum(rank["ledger"]["resent"] for rank in ranks) > 0, "nothing was in flight: this test shows nothing"
    for rank in ranks:
        assert rank["ledger"]["accepted"] == rank["ledger"]["answered"] > 0
        assert rank["ledger"]["duplicates"] == 0
        assert [step["versions"] for step in rank["steps"]] == [[0], [1], [2]]
        for step in rank["steps"]:
            assert step["metrics"]["actor/mismatch_abs_max"] < 1e-5
    of_steps = [
        [uid for step in steps for uid in step["uids"]] for steps in zip(*(r["steps"] for r in ranks), strict=True)
    ]
    assert [len(uids) for uids in of_steps] == [len(set(uids)) for uids in of_steps] == [4] * STEPS


@pytest.mark.slow
def test_it_does_ahead_of_training_too(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", family="llama", tied=True)
    ranks = run_distributed(_fit, 2, tmp_path, model, max_staleness=1, init_process_group=False, timeout=180.0)
    assert ranks[0]["deaths"] == 1
    assert sum(rank["ledger"]["resent"] for rank in ranks) > 0, "nothing was in flight: this test shows nothing"
    assert all(rank["ledger"]["duplicates"] == 0 for rank in ranks)
    uids = [uid for rank in ranks for step in rank["steps"] for uid in step["uids"]]
    assert len(uids) == len(set(uids)) == 4 * STEPS
    for rank in ranks:
        for index, step in enumerate(rank["steps"]):
            assert set(step["versions"]) <= {index, index - 1}


def test_rounds_end_alike_on_all_ranks() -> None:
    """One rank waits three times, the other is done at once; who leads asks for a push in the second round."""

    def rank(number: int, body: Callable[[PushRounds], None]) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        needs = iter([False, True, False, False, False])
        pushed: list[float] = []

        def exchange(state: int) -> list[int]:
            parts = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(parts, torch.tensor([state]))
            return [int(part) for part in parts]

        rounds = PushRounds(
            exchange=exchange, needed=lambda: number == 0 and next(needs), push=lambda: pushed.append(time.monotonic())
        )
        error = ""
        try:
            with rounds.session():
                body(rounds)
        except (RuntimeError, ZeroDivisionError) as caught:
            error = f"{type(caught).__name__} {caught}"
        assert not rounds.may_come
        rounds.look()  # outside a session nobody is asked
        return {"pushed": len(pushed), "error": error}

    def waits() -> dict[str, Any]:
        number = int(os.environ["RANK"])
        return rank(number, lambda rounds: [rounds.look() for _ in range(0 if number == 0 else 3)] and None)

    def fails() -> dict[str, Any]:
        number = int(os.environ["RANK"])
        return rank(number, lambda rounds: rounds.look() if number == 0 else 1 // 0 and None)

    assert run_distributed(waits, 2, timeout=30.0) == [{"pushed": 1, "error": ""}] * 2
    first, second = run_distributed(fails, 2, timeout=30.0)
    assert first["error"].startswith("RuntimeError Rank 1 has failed in this rollout")
    assert second["error"].startswith("ZeroDivisionError")
