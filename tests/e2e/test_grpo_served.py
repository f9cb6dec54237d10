"""GRPO with replicas in processes of their own: one rank and two, a replica killed between and within steps."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import Recorder, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import VLLMRollout
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.rollout.served import ServedRolloutEngine

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

STEPS = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), family="llama", tied=True)


class Killer(RLCallback):
    """Kills the first replica as soon as the second step's weights moved, just before they are pushed."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        (rollout,) = [c for c in trainer.callbacks if isinstance(c, VLLMRollout)]  # type: ignore[attr-defined]
        engine = rollout.engine
        if step.rl_step == 1 and isinstance(engine, ServedRolloutEngine) and engine._fleet is not None:
            self.killed.append(engine._fleet.pids[0])
            os.kill(engine._fleet.pids[0], signal.SIGKILL)


def _fit(root: Path, model: Path, mode: str, strategy: str, devices: int, kill: bool) -> dict[str, Any]:
    recorder, killer = Recorder(), Killer()
    served = {"mode": "server", "replicas": 2, "server": {"threads": 1}} if mode == "server" else {}
    rollout = VLLMRollout(
        num_rollouts=4,
        max_new_tokens=8,
        max_model_len=64,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        **served,  # type: ignore[arg-type]
    )
    callbacks = [recorder, *([killer] if kill else [])]
    trainer = toy_trainer(root, callbacks=callbacks, rollout=rollout, strategy=strategy, devices=devices)
    try:
        trainer.fit(toy_module(model, max_rl_steps=STEPS), toy_data())
        engine = rollout.engine
        ledger = vars(engine.pool.ledger) if isinstance(engine, ServedRolloutEngine) else {}
        return {"steps": recorder.steps, "killed": len(killer.killed), "ledger": ledger}
    finally:
        rollout.shutdown()


def _run(*arguments: Any, devices: int) -> list[dict[str, Any]]:
    return run_distributed(
        _fit, devices, *arguments[:4], devices, *arguments[4:], init_process_group=False, timeout=240
    )


def test_served_replicas_give_what_an_engine_in_the_process_gives(tmp_path: Path, directory: Path) -> None:
    (colocated,) = _run(tmp_path / "a", directory, "colocated", "auto", False, devices=1)
    (served,) = _run(tmp_path / "b", directory, "server", "auto", True, devices=1)
    assert served["killed"] == 1
    assert served["ledger"]["accepted"] == served["ledger"]["answered"] > 0
    ranks = _run(tmp_path / "c", directory, "server", "fsdp2_rl", False, devices=2)
    for index, step in enumerate(colocated["steps"]):
        for other in (served["steps"][index], {"tokens": [t for r in ranks for t in r["steps"][index]["tokens"]]}):
            assert other["tokens"] == step["tokens"], index
        assert served["steps"][index]["versions"] == [index]
        assert served["steps"][index]["metrics"]["actor/mismatch_abs_max"] < 1e-5
        assert served["steps"][index]["metrics"]["sync/tensors_compared"] > 0
        for rank in ranks:
            assert rank["steps"][index]["versions"] == [index]
            assert rank["steps"][index]["metrics"]["actor/mismatch_abs_max"] < 1e-5


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="mode='server'"):
        VLLMRollout(replicas=2)
    with pytest.raises(ValueError, match="'colocated' or 'server'"):
        VLLMRollout(mode="remote")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="run already"):
        VLLMRollout(mode="server", urls=["http://127.0.0.1:1"], replicas=2)
    with pytest.raises(ValueError, match="2 lists of 1"):
        VLLMRollout(mode="server", replicas=2, devices=[[0]])
