"""Replicas in processes of their own: real vLLM behind HTTP, what they sample, what happens when they die or hang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from support.replicas import config, fresh, push, tokens_generated, two_replicas
from support.rollout import largest_difference, naive_log_probs, perturb, prompt_batch
from support.tiny import tiny_model, write_tiny_model
from support.waiting import within

from lightning_rlhf.contracts.rollout import SamplingConfig
from lightning_rlhf.rollout.served import ServedRolloutEngine
from lightning_rlhf.rollout.shared_memory_traces import shared_by_group
from lightning_rlhf.types import Rollouts

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

PROMPTS = prompt_batch({f"p{i}": [5 + (i + j) % 50 for j in range(3 + i % 4)] for i in range(6)})
SAMPLING = SamplingConfig(n=4, max_new_tokens=12)
LONG = SamplingConfig(n=4, max_new_tokens=180, stop_token_ids=())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), tied=True, seed=7)


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[ServedRolloutEngine]:
    """Two replicas, for the tests that leave them as they were."""
    served = two_replicas(model_path)
    yield served
    served.shutdown()


def check_complete(engine: ServedRolloutEngine, rollouts: Rollouts, *, num_samples: int = SAMPLING.n) -> None:
    """Each response once, none without tokens, and the account says the same."""
    wanted = [(uid, sample) for uid in PROMPTS.uids for sample in range(num_samples)]
    assert list(zip(rollouts.uids, rollouts.sample_indices, strict=True)) == wanted
    assert set(rollouts.finish_reasons) <= {"stop", "length"}
    assert int(rollouts.response_lengths.min()) > 0
    assert engine.pool.ledger.accepted == engine.pool.ledger.answered
    assert engine.pool.ledger.duplicates == 0


def test_no_weights_no_samples_then_both_replicas_sample_with_each_push(engine: ServedRolloutEngine) -> None:
    engine.weight_version = None
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.generate(PROMPTS, SAMPLING, rl_step=0)
    for version in range(2):
        model = fresh(engine, seed=version, version=version)
        rollouts = engine.generate(PROMPTS, SAMPLING, rl_step=version)
        check_complete(engine, rollouts)
        assert largest_difference(model, rollouts) < 1e-5
        assert set(rollouts.token_versions[rollouts.response_mask].tolist()) == {version}
        ids = [5, 6, 7, 8]
        assert engine.score([ids])[0] == pytest.approx(naive_log_probs(model, ids), abs=1e-5)
        held = engine.read_weights(["model.norm.weight", "model.embed_tokens.weight"])
        assert all(torch.equal(held[name], model.state_dict()[name]) for name in held)
        assert len(held) == 2
    generated = [engine._wait(client.health()).generated for client in (r.client for r in engine.pool.replicas)]
    assert min(generated) > 0, "one replica did all the work"


def test_e01_samples_do_not_depend_on_the_replica(engine: ServedRolloutEngine) -> None:
    fresh(engine, seed=3, version=3)
    first = engine.generate(PROMPTS, SAMPLING, rl_step=5)
    engine.pool._router.in_flight[0] += 1000  # all go to the other one
    second = engine.generate(PROMPTS, SAMPLING, rl_step=5)
    engine.pool._router.in_flight[0] -= 1000
    assert first.tokens.tolist() == second.tokens.tolist()
    assert engine.pool._router.in_flight == [0, 0]


def test_strangers_are_refused(engine: ServedRolloutEngine) -> None:
    fresh(engine, seed=0, version=0)  # a replica without weights refuses everybody's requests
    url = engine.urls[0]
    assert url.startswith("http://127.0.0.1:")
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert requests.get(f"{url}/health", headers=headers, timeout=5).status_code == 401
        assert requests.post(f"{url}/weights", json={"info": {}}, headers=headers, timeout=5).status_code == 401
    known = {"Authorization": f"Bearer {engine.token}"}
    assert requests.get(f"{url}/health", headers=known, timeout=5).json()["in_flight"] == 0
    answer = requests.post(f"{url}/generate", json={"requests": [{"request_id": "x"}]}, headers=known, timeout=5)
    assert answer.status_code == 400


def test_e03_a_prompt_without_room_is_skipped_and_an_invalid_sampling_is_told(engine: ServedRolloutEngine) -> None:
    fresh(engine, seed=1, version=1)
    prompts = prompt_batch({"long": [5] * 256, "short": [5, 6]})
    rollouts = engine.generate(prompts, SamplingConfig(n=2, max_new_tokens=4), rl_step=0)
    assert rollouts.finish_reasons[:2] == ["skipped", "skipped"]
    assert set(rollouts.finish_reasons[2:]) <= {"stop", "length"}
    with pytest.raises(ValueError, match="temperature 1 only"):
        engine.score([[5, 6]], temperature=0.5)


def generate_in_background(engine: ServedRolloutEngine, sampling: SamplingConfig, *, rl_step: int) -> Callable[[], Any]:
    box: dict[str, Any] = {}

    def run() -> None:
        try:
            box["result"] = engine.generate(PROMPTS, sampling, rl_step=rl_step)
        except RuntimeError as error:
            box["result"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(timeout=90)
        assert not thread.is_alive(), "generation hangs"
        return box["result"]

    return result


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "hang"])
def test_a_replica_lost_in_generation_costs_no_response(engine: ServedRolloutEngine, how: signal.Signals) -> None:
    assert engine._fleet is not None
    model = fresh(engine, seed=4, version=4)
    expected = engine.generate(PROMPTS, LONG, rl_step=1)
    for replica in engine.pool.replicas:
        replica.client.silence_seconds = replica.client.answer_seconds = 3.0
    resent, start = engine.pool.ledger.resent, tokens_generated(engine)
    result = generate_in_background(engine, LONG, rl_step=1)
    within(20, lambda: tokens_generated(engine) > start + 100)
    victim = engine._fleet.pids[0]
    os.kill(victim, how)
    rollouts = result()
    check_complete(engine, rollouts)
    assert rollouts.tokens.tolist() == expected.tokens.tolist()
    assert largest_difference(model, rollouts) < 1e-5
    assert engine.pool.ledger.resent > resent, "nothing was in flight: this test shows nothing"

    # it comes back with the current weights, without another push
    within(60, lambda: engine.pool.replicas[0].state == "up" and engine._fleet.pids.get(0) not in (None, victim))
    engine.pool._router.in_flight[1] += 1000
    again = engine.generate(PROMPTS, SAMPLING, rl_step=2)
    engine.pool._router.in_flight[1] -= 1000
    assert largest_difference(model, again) < 1e-5
    assert set(again.token_versions[again.response_mask].tolist()) == {4}


@pytest.mark.parametrize("in_flight", ["keep", "resubmit"])
def test_d05_weights_that_change_under_requests_in_flight(engine: ServedRolloutEngine, in_flight: str) -> None:
    """Tokens before the switch are the old weights', those after it the new ones'; the versions say where it was."""
    engine.in_flight = in_flight
    old = fresh(engine, seed=11, version=11)
    new = tiny_model(tied=True).eval()
    perturb(new, seed=12, scale=0.3)
    continued, start = engine.pool.ledger.continued, tokens_generated(engine)
    result = generate_in_background(engine, LONG, rl_step=3)
    within(20, lambda: tokens_generated(engine) > start + 300)
    push(engine, new, version=12)
    rollouts = result()
    check_complete(engine, rollouts)
    worst_old = worst_new = wrong_side = 0.0
    spans = set()
    for row in range(len(rollouts)):
        first, last = rollouts.cu_seqlens[row : row + 2].tolist()
        ids = rollouts.tokens[first:last].tolist()
        sampled = rollouts.response_mask[first:last].tolist()
        versions, own = rollouts.token_versions[first:last].tolist(), rollouts.rollout_log_probs[first:last].tolist()
        by_old, by_new = naive_log_probs(old, ids), naive_log_probs(new, ids)
        spans.add(tuple(sorted(set(versions) - {-1})))
        assert [v for v in versions if v != -1] == sorted(v for v in versions if v != -1)
        for place in [place for place, on in enumerate(sampled) if on]:
            right, wrong = (by_old, by_new) if versions[place] == 11 else (by_new, by_old)
            difference = abs(own[place] - right[place])
            if versions[place] == 11:
                worst_old = max(worst_old, difference)
            else:
                worst_new = max(worst_new, difference)
            wrong_side = max(wrong_side, abs(own[place] - wrong[place]))
    assert worst_old < 1e-5
    assert worst_new < 1e-5
    assert (11, 12) in spans, "no response crossed the switch: this test shows nothing"
    assert wrong_side > 0.1
    if in_flight == "resubmit":
        assert engine.pool.ledger.continued > continued
    engine.in_flight = "keep"


def test_abort_keeps_what_there_is(engine: ServedRolloutEngine) -> None:
    model = fresh(engine, seed=2, version=2)
    start = tokens_generated(engine)
    result = generate_in_background(engine, LONG, rl_step=4)
    within(20, lambda: tokens_generated(engine) > start + 300)
    engine.abort()
    rollouts = result()
    assert "abort" in rollouts.finish_reasons
    assert int(rollouts.response_lengths.max()) < 180
    assert largest_difference(model, rollouts) < 1e-5
    engine.generate(PROMPTS, SAMPLING, rl_step=4)


def test_a_replica_that_hangs_when_weights_come_is_replaced_and_the_push_goes_on(engine: ServedRolloutEngine) -> None:
    assert engine._fleet is not None
    fresh(engine, seed=2, version=2)
    client = engine.pool.replicas[1].client
    client.answer_seconds, client.stall_seconds, client.load_seconds = 2.0, 2.0, 4.0
    victim = engine._fleet.pids[1]
    os.kill(victim, signal.SIGSTOP)
    start = time.monotonic()
    model = fresh(engine, seed=6, version=6)
    assert time.monotonic() - start < 40
    assert largest_difference(model, engine.generate(PROMPTS, SAMPLING, rl_step=0)) < 1e-5
    client.answer_seconds, client.stall_seconds, client.load_seconds = 20.0, 120.0, 600.0
    within(60, lambda: engine.pool.replicas[1].state == "up" and engine._fleet.pids.get(1) not in (None, victim))
    ids = [5, 6, 7, 8]
    scores = engine._wait(engine.score_by(client, [ids]))[0]
    assert scores == pytest.approx(naive_log_probs(model, ids), abs=1e-5)


def test_a_push_that_no_replica_can_load_leaves_them_out_of_service(engine: ServedRolloutEngine) -> None:
    model = fresh(engine, seed=2, version=2)
    engine.pause()
    engine.weight_version = None
    tensors = [(name, tensor) for name, tensor in model.state_dict().items() if "q_proj" not in name]
    with pytest.raises(RuntimeError, match="q_proj"):
        engine.load_weights(iter(tensors))
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.generate(PROMPTS, SAMPLING, rl_step=0)
    again = fresh(engine, seed=3, version=3)
    assert largest_difference(again, engine.generate(PROMPTS, SAMPLING, rl_step=0)) < 1e-5


def test_tensor_parallel_workers_of_a_replica(model_path: Path) -> None:
    served = ServedRolloutEngine(
        model_path, max_model_len=256, fleet_configs=[config(model_path, tensor_parallel_size=2)]
    )
    try:
        for version in range(2):
            model = fresh(served, seed=version, version=version)
            rollouts = served.generate(PROMPTS, SAMPLING, rl_step=version)
            assert largest_difference(model, rollouts) < 1e-5
        assert served.pool.replicas[0].workers == 2
        held = served.read_weights(["model.norm.weight", "model.embed_tokens.weight"])
        assert torch.equal(held["model.norm.weight"], model.state_dict()["model.norm.weight"])
        assert len(held) == 1, "a share of the embedding is not the embedding"
        assert served._fleet is not None
        group = served._fleet.pids[0]
        shared = shared_by_group(group)
        assert {name.partition("_")[0] for name in shared} == {"psm", "vllm"}
        time.sleep(1.5)  # the host looks each second
        os.killpg(group, signal.SIGKILL)
        within(20, lambda: not any((Path("/dev/shm") / name).exists() for name in shared))
        rollouts = served.generate(PROMPTS, SAMPLING, rl_step=1)
        assert largest_difference(model, rollouts) < 1e-5
        shared = shared_by_group(served._fleet.pids[0])
        time.sleep(1.5)
    finally:
        served.shutdown()
    assert shared
    assert not any((Path("/dev/shm") / name).exists() for name in shared)


def serve_by_hand(model_path: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lightning_rlhf.rollout.serve", str(model_path), "--port", str(port)]
    command += ["--max-model-len", "256", "--kv-cache-bytes", str(32 << 20), "--max-num-seqs", "32", "--threads", "1"]
    return subprocess.Popen(command, env={**os.environ, "LIGHTNING_RLHF_REPLICA_TOKEN": "a secret"})


def test_a_replica_given_by_url_gets_the_current_weights_when_somebody_starts_it_again(model_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = serve_by_hand(model_path, port)
    served = None
    try:
        url = f"http://127.0.0.1:{port}"
        settings = {"start_seconds": 90.0}
        served = ServedRolloutEngine(
            model_path, max_model_len=256, urls=[url], token="a secret", pool_settings=settings
        )
        model = fresh(served, seed=1, version=1)
        expected = served.generate(PROMPTS, SAMPLING, rl_step=0)
        assert largest_difference(model, expected) < 1e-5
        server.kill()
        server.wait(10)
        result = generate_in_background(served, SAMPLING, rl_step=0)
        server = serve_by_hand(model_path, port)
        assert result().tokens.tolist() == expected.tokens.tolist()
    finally:
        if served is not None:
            served.shutdown()
        server.kill()
        server.wait(10)


def test_when_every_replica_dies_too_often_the_run_stops_and_says_so(engine: ServedRolloutEngine) -> None:
    """The last test: the replicas stay dead."""
    assert engine._fleet is not None
    fresh(engine, seed=2, version=2)
    engine.pool._max_deaths = 0
    start = tokens_generated(engine)
    result = generate_in_background(engine, LONG, rl_step=6)
    within(20, lambda: tokens_generated(engine) > start + 100)
    for pid in list(engine._fleet.pids.values()):
        os.kill(pid, signal.SIGKILL)
    error = result()
    assert isinstance(error, RuntimeError)
    assert "No replica is left" in str(error)
    assert "killed by SIGKILL" in str(error)
