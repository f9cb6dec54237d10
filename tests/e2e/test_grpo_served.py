"""GRPO with replicas in processes of their own: one rank and two, a replica killed between and within steps."""

from __future__ import annotations

import asyncio
import os
import signal
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

from lightning_rlhf.callbacks import RLCheckpoint, VLLMRollout, WeightSync
from lightning_rlhf.callbacks.dynamic_sampling import DynamicSampling
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.data import ListPrompts, PromptDataModule
from lightning_rlhf.rollout.served import ServedRolloutEngine

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

STEPS = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), family="llama", tied=True)


class Killer(RLCallback):
    """Kills the first replica, once for each RL step and moment, if it is there.

    Moments are ``before`` a step's push, ``inside`` it, and in the ``generation`` that follows. At ``hang`` it is not
    killed but stopped, inside the push: its link is silent from then on, while its connections stay open.
    """

    def __init__(self, moments: dict[int, str]) -> None:
        self.moments = moments
        self.killed: list[int] = []
        self._signal = signal.SIGKILL

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        (rollout,) = [c for c in trainer.callbacks if isinstance(c, VLLMRollout)]  # type: ignore[attr-defined]
        (sync,) = [c for c in trainer.callbacks if isinstance(c, WeightSync)]  # type: ignore[attr-defined]
        engine, moment = rollout.engine, self.moments.get(step.rl_step)
        if not isinstance(engine, ServedRolloutEngine) or engine._fleet is None:
            return
        if moment:
            self._wait_until_it_is_there(engine)
        if moment == "before":
            self._kill(engine)
        elif moment in ("inside", "hang"):
            if moment == "hang":
                self._signal = signal.SIGSTOP
                engine.pool.replicas[0].client.answer_seconds = 3.0
            carrier = sync.checkpoint_engine
            send = carrier.send_weights

            def send_half(named_tensors: Iterator[Any]) -> None:
                del carrier.send_weights  # type: ignore[misc] # the class's own, for the next push
                send(self._kill_after(5, named_tensors, engine))

            carrier.send_weights = send_half  # type: ignore[method-assign]
        elif moment == "generation":
            run = engine.pool._send

            async def send_and_kill(replica: Any, waiting: Any) -> None:
                if replica.index == 0:
                    del engine.pool._send  # type: ignore[misc]
                    asyncio.get_running_loop().call_later(0.01, self._kill, engine)
                await run(replica, waiting)

            engine.pool._send = send_and_kill  # type: ignore[method-assign]

    def _wait_until_it_is_there(self, engine: ServedRolloutEngine) -> None:
        """It may still be starting again, and a step of a tiny model is short."""
        end = time.monotonic() + 60
        while engine.pool.replicas[0].state not in ("up", "unready"):
            assert time.monotonic() < end, engine.pool.describe()
            time.sleep(0.02)

    def _kill_after(self, count: int, named_tensors: Iterator[Any], engine: ServedRolloutEngine) -> Iterator[Any]:
        for index, named_tensor in enumerate(named_tensors):
            if index == count:
                self._kill(engine)
            yield named_tensor

    def _kill(self, engine: ServedRolloutEngine) -> None:
        assert engine._fleet is not None
        self.killed.append(engine._fleet.pids[0])
        os.kill(engine._fleet.pids[0], self._signal)
        self._signal = signal.SIGKILL


def _fit(
    root: Path,
    model: Path,
    mode: str,
    strategy: str,
    devices: int,
    kill: dict[int, str],
    carrier: str = "naive",
    arguments: dict[str, Any] | None = None,
    carrier_arguments: dict[str, Any] | None = None,
) -> dict[str, Any]:
    recorder, killer = Recorder(), Killer(kill)
    served = {"mode": "server", "replicas": 2, "server": {"threads": 1}} if mode == "server" else {}
    served |= arguments or {}
    rollout = VLLMRollout(
        num_rollouts=4,
        max_new_tokens=8,
        max_model_len=64,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        **served,  # type: ignore[arg-type]
    )
    callbacks = [killer, WeightSync(engine=carrier, engine_kwargs=carrier_arguments), recorder]
    settings: dict[str, Any] = {"weight_sync": False, "strategy": strategy, "devices": devices}
    trainer = toy_trainer(root, callbacks=callbacks, rollout=rollout, **settings)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", "A replica was lost in a push")
            trainer.fit(toy_module(model, max_rl_steps=STEPS), toy_data())
        engine = rollout.engine
        ledger = vars(engine.pool.ledger) if isinstance(engine, ServedRolloutEngine) else {}
        warned = " ".join(str(one.message) for one in caught)
        return {"steps": recorder.steps, "killed": len(killer.killed), "ledger": ledger, "warned": warned}
    finally:
        rollout.shutdown()


def _run(*arguments: Any, devices: int) -> list[dict[str, Any]]:
    return run_distributed(
        _fit, devices, *arguments[:4], devices, *arguments[4:], init_process_group=False, timeout=240
    )


def test_served_replicas_give_what_an_engine_in_the_process_gives(tmp_path: Path, directory: Path) -> None:
    (colocated,) = _run(tmp_path / "a", directory, "colocated", "auto", {}, devices=1)
    (served,) = _run(tmp_path / "b", directory, "server", "auto", {1: "before"}, devices=1)
    assert served["killed"] == 1
    assert served["ledger"]["accepted"] == served["ledger"]["answered"] > 0
    moments = {0: "before", 1: "inside", 2: "generation"}
    ranks = _run(tmp_path / "c", directory, "server", "fsdp2_rl", moments, "shm", devices=2)
    assert [rank["killed"] for rank in ranks] == [3, 0]
    for rank in ranks:
        assert rank["ledger"]["accepted"] == rank["ledger"]["answered"] > 0
        assert rank["ledger"]["duplicates"] == 0
    for index, step in enumerate(colocated["steps"]):
        for other in (served["steps"][index], {"tokens": [t for r in ranks for t in r["steps"][index]["tokens"]]}):
            assert other["tokens"] == step["tokens"], (index, len(other))
        assert served["steps"][index]["versions"] == [index]
        assert served["steps"][index]["metrics"]["actor/mismatch_abs_max"] < 1e-5
        assert served["steps"][index]["metrics"]["sync/tensors_compared"] > 0
        for rank in ranks:
            assert rank["steps"][index]["versions"] == [index]
            assert rank["steps"][index]["metrics"]["actor/mismatch_abs_max"] < 1e-5


def test_a_link_that_hangs_in_a_push_ends_the_push_within_its_timeout_and_the_run_goes_on(
    tmp_path: Path, directory: Path
) -> None:
    (run,) = _run(tmp_path, directory, "server", "auto", {1: "hang"}, "shm", {}, {"timeout": 3.0}, devices=1)
    assert run["killed"] == 1
    assert run["ledger"]["accepted"] == run["ledger"]["answered"] > 0
    assert run["ledger"]["duplicates"] == 0
    assert [step["versions"] for step in run["steps"]] == [[0], [1], [2], [3]]
    for step in run["steps"]:
        assert len(step["uids"]) == len(set(step["uids"])) == 4
        assert step["metrics"]["actor/mismatch_abs_max"] < 1e-5
    assert "Weight sync, phase" in run["warned"]
    assert "replica-0" in run["warned"]


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_only_replica_of_a_checkpoint_engine_gets_the_weights_again_as_soon_as_it_is_back(
    tmp_path: Path, directory: Path, max_staleness: int
) -> None:
    """It dies with requests in flight: they wait for a push in the middle of the rollout, and none is lost."""
    arguments = {"replicas": 1, "max_staleness": max_staleness}
    moments = {1: "generation"}
    (run,) = _run(tmp_path, directory, "server", "auto", moments, "shm", arguments, devices=1)
    assert run["killed"] == 1
    assert run["ledger"]["resent"] > 0, "nothing was in flight: this test shows nothing"
    assert run["ledger"]["duplicates"] == 0
    if not max_staleness:
        assert run["ledger"]["accepted"] == run["ledger"]["answered"] > 0
        assert [step["versions"] for step in run["steps"]] == [[0], [1], [2], [3]]
    trained = [uid for step in run["steps"] for uid in set(step["uids"])]
    assert len(trained) == len(run["steps"]) * 4
    for index, step in enumerate(run["steps"]):
        assert set(step["versions"]) <= {index, index - max_staleness}
        if step["versions"] == [index]:
            assert step["metrics"]["actor/mismatch_abs_max"] < 1e-5


def _flat_for_even(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Every second prompt's rewards are all equal; the others' depend on the text alone."""
    even = [int("".join(c for c in prompt.split("+")[0] if c.isdigit())) % 2 == 0 for prompt in prompts]
    return [0.0 if flat else sum(map(ord, text)) / 1e3 for text, flat in zip(responses, even, strict=True)]


def _fit_ahead(
    root: Path, model: Path, arguments: dict[str, Any], every: Any, steps: int, ckpt_path: str | None, devices: int = 1
) -> dict[str, Any]:
    recorder, check = Recorder(), VersionCheck(model)
    reward = {"reward": _flat_for_even} if "dynamic_sampling" in arguments else {}
    rollout = VLLMRollout(
        mode="server",
        server={"threads": 1},
        num_rollouts=4,
        max_new_tokens=24,
        max_model_len=64,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        **arguments,
    )
    checked = [check] if ckpt_path is None else []
    callbacks: list[pl.Callback] = [recorder, RLCheckpoint(every_n_rl_steps=2), *checked]
    settings: dict[str, Any] = {"strategy": "fsdp2_rl", "devices": devices}
    callbacks.append(WeightSync(every=every, engine="naive" if devices == 1 else "shm"))
    trainer = toy_trainer(root, callbacks=callbacks, rollout=rollout, weight_sync=False, **settings)
    module = toy_module(model, max_rl_steps=steps, **reward)
    try:
        data = PromptDataModule(ListPrompts([f"{i} + {i + 1} =" for i in range(24)]), prompts_per_step=4)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        window = rollout._async.window.to_json()  # type: ignore[union-attr]
        left = [p["uid"] for p in window["prompts"]] + [g["prompt"]["uid"] for g in window["finished"]]
        return {
            "steps": recorder.steps,
            "worst": check.worst,
            "ages": check.ages,
            "trained": [uid for step in recorder.steps for uid in step["uids"]],
            "left": left,
        }
    finally:
        rollout.shutdown()


def _run_ahead(*arguments: Any, devices: int = 1) -> list[dict[str, Any]]:
    return run_distributed(_fit_ahead, devices, *arguments, devices, init_process_group=False, timeout=240)


@pytest.mark.slow
def test_one_step_off_over_a_checkpoint(tmp_path: Path, directory: Path) -> None:
    (first,) = _run_ahead(tmp_path, directory, {"max_staleness": 1}, "optimizer_step", 4, None)
    assert first["worst"] < 1e-5
    assert first["ages"] == {0, 1}
    assert len(first["trained"]) == len(set(first["trained"])) == 16
    assert len(first["left"]) == 4
    (resumed,) = _run_ahead(tmp_path, directory, {"max_staleness": 1}, "optimizer_step", 6, "last")
    assert set(first["left"]) <= set(resumed["trained"]), "what was under way when the run stopped was lost"
    every = first["trained"] + resumed["trained"] + resumed["left"]
    assert len(every) == len(set(every)) == 28
    for step in [*first["steps"], *resumed["steps"]]:
        metrics = step["metrics"]
        assert metrics["rollout/staleness_0"] + metrics["rollout/staleness_1"] == pytest.approx(1.0)
        assert metrics["rollout/staleness_max"] <= 1
    assert max(step["metrics"]["rollout/staleness_mean"] for step in first["steps"]) > 0


def test_two_ranks_run_ahead_and_one_goes_on(tmp_path: Path, directory: Path) -> None:
    ranks = _run_ahead(tmp_path, directory, {"max_staleness": 1}, "optimizer_step", 4, None, devices=2)
    assert max(rank["worst"] for rank in ranks) < 1e-5
    trained, left = [[uid for rank in ranks for uid in rank[key]] for key in ("trained", "left")]
    assert len(trained) == len(set(trained)) == 16
    assert len(left) == 4
    assert set().union(*(rank["ages"] for rank in ranks)) == {0, 1}
    for first, second in zip(*(rank["steps"] for rank in ranks), strict=True):
        shares = [first["metrics"][f"rollout/staleness_{age}"] for age in range(2)]
        assert sum(shares) == pytest.approx(1.0)
        assert shares == [second["metrics"][f"rollout/staleness_{age}"] for age in range(2)]
    (one,) = _run_ahead(tmp_path, directory, {"max_staleness": 1}, "optimizer_step", 6, "last")
    assert set(left) <= set(one["trained"])
    every = trained + one["trained"] + one["left"]
    assert len(every) == len(set(every)) == 28


def test_fully_asynchronous_with_over_sampling_and_rare_pushes(tmp_path: Path, directory: Path) -> None:
    arguments = {"max_staleness": 3, "over_sampling": 1.5, "in_flight": "resubmit"}
    (found,) = _run_ahead(tmp_path, directory, arguments, 2, 6, None)
    assert found["worst"] < 1e-5
    assert max(found["ages"]) <= 3
    assert max(found["ages"]) > 1
    assert len(found["trained"]) == len(set(found["trained"])) == 24
    assert not set(found["trained"]) & set(found["left"])
    assert len(found["left"]) == 2 * 4 + 2  # two steps ahead, and half a step's groups over


def test_dynamic_sampling_ahead_of_training_on_two_ranks(tmp_path: Path, directory: Path) -> None:
    """Groups without signal make room for groups that are under way already; none is lost, none trains twice."""
    arguments = {"max_staleness": 1, "dynamic_sampling": DynamicSampling()}
    ranks = _run_ahead(tmp_path, directory, arguments, "optimizer_step", 3, None, devices=2)
    assert max(rank["worst"] for rank in ranks) < 1e-5
    assert set().union(*(rank["ages"] for rank in ranks)) == {0, 1}
    trained, left = [[uid for rank in ranks for uid in rank[key]] for key in ("trained", "left")]
    assert len(trained) == len(set(trained)) == 12
    assert all(int(uid.partition("@")[0]) % 2 for uid in trained), "a group of equal rewards was trained on"
    assert len(left) == len(set(left)) == 4
    assert not set(trained) & set(left)
    for first, second in zip(*(rank["steps"] for rank in ranks), strict=True):
        for name in ("rollout/drawn_prompts", "rollout/dropped_groups", "rollout/staleness_1"):
            assert first["metrics"][name] == second["metrics"][name], name
        metrics = first["metrics"]
        assert metrics["rollout/kept_groups"] == 4
        assert metrics["rollout/drawn_prompts"] == 4 + metrics["rollout/dropped_groups"]
    assert sum(step["metrics"]["rollout/dropped_groups"] for step in ranks[0]["steps"]) > 0
    assert max(step["metrics"]["rollout/staleness_mean"] for step in ranks[0]["steps"]) > 0


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="mode='server'"):
        VLLMRollout(replicas=2)
    with pytest.raises(ValueError, match="'colocated' or 'server'"):
        VLLMRollout(mode="remote")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="run already"):
        VLLMRollout(mode="server", urls=["http://127.0.0.1:1"], replicas=2)
    with pytest.raises(ValueError, match="mode='server'"):
        VLLMRollout(max_staleness=1)
    with pytest.raises(ValueError, match="a number of steps"):
        WeightSync(every=0)
    with pytest.raises(ValueError, match="2 lists of 1"):
        VLLMRollout(mode="server", replicas=2, devices=[[0]])
