"""Trainer ranks that hang, are late or fail in a push: the others leave in time, and say who was missing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support.fork import run_distributed
from support.pushes import TinyTrainer, new_manager, start
from torch import Tensor

from lightning_rlhf.weights.roll_call import TrainerRankLostError

LIMIT = 2.0
PATIENCE = 3 * 1.0
"""A rank with replicas may be so much later in a gather: three times its link's timeout."""


def rank_with(fault: Callable[[TinyTrainer], None], *, of: int) -> Callable[[], dict[str, Any]]:
    """A rank that pushes twice; the second time ``fault`` is done on one of them. Rank 0 has a replica."""

    def rank() -> dict[str, Any]:
        trainer, number = TinyTrainer(), dist.get_rank()
        _, _, replicas = start({"a": ""}) if number == 0 else (None, None, [])
        settings = {"rank_timeout": LIMIT, "feeding": 3.0 if number == 0 else 0.0}
        manager = new_manager(trainer, replicas, link_timeout=PATIENCE / 3, **settings)
        manager.update_weights(0)
        if number == of:
            fault(trainer)
        begun, error = time.monotonic(), None
        try:
            manager.update_weights(1)
        except RuntimeError as caught:
            error = caught
        versions = [one.weight_version for one in replicas]
        seconds = time.monotonic() - begun
        if error is not None and number != of:
            time.sleep(1.0)  # the processes' ends are not what ends the others' waits
        return {"error": type(error).__name__, "text": str(error), "versions": versions, "seconds": seconds}

    return rank


def late(**seconds: float) -> Callable[[TinyTrainer], None]:
    def fault(trainer: TinyTrainer) -> None:
        trainer.seconds_late = {name.replace("_", "."): value for name, value in seconds.items()}

    return fault


def test_a_rank_that_hangs_in_the_gather_is_named_within_the_timeout() -> None:
    first, _, third = run_distributed(rank_with(late(layer_2=8.0), of=1), 3, timeout=60.0)
    assert first["error"] == third["error"] == "TrainerRankLostError"
    assert "phase 'gather'" in first["text"]
    assert "rank 1 did not come" in first["text"]
    assert "rank 0" in third["text"]
    assert max(first["seconds"], third["seconds"]) < 2 * LIMIT + PATIENCE + 3.0
    assert first["versions"] == [None], "it samples with a mixture"


@pytest.mark.slow
def test_the_rank_that_feeds_replicas_is_missed_as_well() -> None:
    """The others give it the time that its replicas may take, and no more."""
    _, second = run_distributed(rank_with(late(layer_2=14.0), of=0), 2, timeout=60.0)
    assert second["error"] == "TrainerRankLostError"
    assert "phase 'gather'" in second["text"]
    assert "rank 0" in second["text"]
    assert LIMIT + PATIENCE < second["seconds"] < 2 * (LIMIT + PATIENCE) + 3.0


def test_a_slow_push_that_moves_is_left_alone() -> None:
    slow = {f"layer_{index}": 0.75 * LIMIT for index in range(4)}
    for rank in run_distributed(rank_with(late(**slow), of=1), 2, timeout=60.0):
        assert rank["error"] == "NoneType", rank
        assert rank["versions"] in ([1], [])
        assert rank["seconds"] > 2 * LIMIT


def test_an_export_that_fails_on_one_rank_ends_the_push_on_all_with_its_own_error() -> None:
    def fail(trainer: TinyTrainer) -> None:
        gather = trainer.get_per_tensor_param

        def half() -> Iterator[tuple[str, Tensor]]:
            for index, named_tensor in enumerate(gather()):
                if index == 2:
                    raise RuntimeError("layer.2 does not fit its shards")
                yield named_tensor

        trainer.get_per_tensor_param = half  # type: ignore[method-assign]

    first, second = run_distributed(rank_with(fail, of=1), 2, timeout=60.0)
    assert (second["error"], second["text"]) == ("RuntimeError", "layer.2 does not fit its shards")
    assert first["error"] == "RuntimeError"
    assert "Timed out" in first["text"]
    assert first["versions"] == [None]
    assert max(first["seconds"], second["seconds"]) < 2 * LIMIT + 3.0


def test_a_stopped_process_is_named_and_the_groups_keep_their_own_timeouts() -> None:
    """SIGSTOP: no thread of the rank can answer."""

    def rank() -> str:
        trainer, number = TinyTrainer(), dist.get_rank()
        manager = new_manager(trainer, [], rank_timeout=LIMIT)
        manager.update_weights(0)
        backend = dist.group.WORLD._get_backend(trainer.device)  # type: ignore[union-attr]
        assert backend.options._timeout.total_seconds() == 30.0
        parent = os.getpid()
        if number == 1 and os.fork() == 0:
            time.sleep(4.0 * LIMIT)
            os.kill(parent, signal.SIGCONT)  # for the test's own end
            os._exit(0)
        if number == 1:
            os.kill(parent, signal.SIGSTOP)
            return ""
        begun = time.monotonic()
        with pytest.raises(TrainerRankLostError) as caught:
            manager.update_weights(1)
        assert time.monotonic() - begun < LIMIT + 3.0
        return str(caught.value)

    first, _ = run_distributed(rank, 2, timeout=30.0)
    assert "rank 1 did not come" in first
