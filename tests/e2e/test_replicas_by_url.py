"""Replicas that somebody else has started: what does not suit the run is told at once, not after minutes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rollout import prompt_batch
from support.tiny import tiny_model, write_tiny_model

from lightning_rlhf.callbacks.served_rollout import TOKEN_VARIABLE
from lightning_rlhf.contracts.rollout import Guide, SamplingConfig
from lightning_rlhf.rollout.served import ServedRolloutEngine

TOKEN = "the-replica-s-own"


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Model and URL of a replica in bf16 for 48 tokens, once it answers."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lightning_rlhf.rollout.serve", str(model), "--port", str(port)]
    sizes = ["--max-model-len", "48", "--kv-cache-bytes", str(16 << 20), "--threads", "1", "--dtype", "bfloat16"]
    process = subprocess.Popen([*command, *sizes], env={**os.environ, TOKEN_VARIABLE: TOKEN})
    url = f"http://127.0.0.1:{port}"
    try:
        connect(model, url, start_seconds=120.0).shutdown()
        yield model, url
    finally:
        process.terminate()
        assert process.wait(30) == 0


def connect(
    model: Path, url: str, *, token: str = TOKEN, max_model_len: int = 48, start_seconds: float = 60.0
) -> ServedRolloutEngine:
    pool: dict[str, Any] = {"start_seconds": start_seconds}
    return ServedRolloutEngine(model, urls=[url], token=token, max_model_len=max_model_len, pool_settings=pool)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"token": "another"},
            RuntimeError,
            r"Replica 0 cannot be used: .* refused the token: token= .*LIGHTNING_RLHF",
        ),
        ({"path": "/v1"}, RuntimeError, r"is no replica of this version.*There is no /health"),
        ({"max_model_len": 64}, ValueError, r"takes 49 tokens, but max_model_len=64.*--max-model-len 64"),
    ],
)
def test_what_does_not_suit_is_told_at_once(
    replica: tuple[Path, str], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, url = replica
    began = time.monotonic()
    with pytest.raises(error, match=message):
        connect(model, url + change.pop("path", ""), **change)
    assert time.monotonic() - began < 30  # of the 60 s that it would be waited for


def test_a_replica_that_is_not_there_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(
        RuntimeError, match=rf"within 0\.5 s: replica 0 at http://127\.0\.0\.1:{port} is .*Cannot connect"
    ):
        connect(tmp_path, f"http://127.0.0.1:{port}", start_seconds=0.5)


def test_its_dtype_is_known_and_what_it_cannot_do_is_explained(replica: tuple[Path, str]) -> None:
    engine = connect(*replica)
    try:
        assert engine.compute_dtype is torch.bfloat16
        engine.load_weights(tiny_model().state_dict().items())
        engine.weight_version = 0
        capitals = SamplingConfig(max_new_tokens=4, guide=Guide(choice=["YES"]))  # the tokenizer has small letters
        with pytest.raises(ValueError, match=r"gave up on a response.*Change the guide"):
            engine.generate(prompt_batch({"a": [7, 8]}), capitals, rl_step=0)
        with pytest.raises(ValueError, match="Cannot score 49 ids"):
            engine.score([[7] * 49])
        assert [len(row) for row in engine.score([[7], [7] * 48])] == [1, 48]
        rollouts = engine.generate(prompt_batch({"a": [7] * 44}), SamplingConfig(max_new_tokens=9), rl_step=0)
        assert int(rollouts.response_lengths) <= 4  # the room that the run leaves, not the replica's one more
    finally:
        engine.shutdown()
