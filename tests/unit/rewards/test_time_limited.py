from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest
from support.rewards import BreaksWhenLoaded, eight_answers, not_importable, spends
from support.waiting import alive

from lightning_rlhf.rewards import Failure, RewardBrokenError, TimeLimited, WeightedRewards, row_server, score

Where = Literal["process", "thread"]


def of(reward: Any, responses: list[str]) -> list[float | Failure]:
    return list(reward([""] * len(responses), responses, [{}] * len(responses)))


@pytest.fixture(scope="module")
def limited() -> Iterator[TimeLimited]:
    """One helper process for all tests: it takes seconds to start."""
    reward = TimeLimited(spends, seconds=2.0, cpu_seconds=1, memory_bytes=200 << 20)
    reward.start()
    yield reward
    reward.close()


@pytest.mark.parametrize("where", ["process", "thread"])
def test_h04_one_slow_and_one_failing_call_do_not_stop_the_run(where: Where) -> None:
    reward = TimeLimited(eight_answers, seconds=2.0, where=where)
    reward.start()
    begun = time.monotonic()
    scores = score(reward, [""] * 8, [str(k) for k in range(8)], [{}] * 8)
    assert time.monotonic() - begun < 10.0  # on an idle machine 2.1
    assert scores.rewards.isnan().tolist() == [k in (3, 5) for k in range(8)]
    assert scores.rewards[[0, 1, 2, 4, 6, 7]].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert scores.num_failed == 2
    assert scores.failures == {"eight_answers": 2}
    assert scores.errors[0].startswith("row 3, eight_answers: over its limit of 2 s")
    assert scores.errors[1] == "row 5, eight_answers: ZeroDivisionError: answer 5"
    assert of(reward, ["7", "5", "2"]) == [1.0, Failure("ZeroDivisionError: answer 5"), 0.0]
    reward.close()


def test_each_limit_is_named_and_fails_its_row_alone(limited: TimeLimited) -> None:
    found = of(limited, ["fine", "cpu", "memory", "exit", "leave", "fine"])
    assert [found[0], found[5]] == [1.0, 1.0]
    # a busy machine may not give a row its second of processor time within a second
    assert getattr(found[1], "cause", None) in ("cpu", "wall")
    assert getattr(found[2], "cause", None) == "memory"
    assert found[3] == Failure("its process ended without an answer, exit status 3")
    assert found[4] == Failure("SystemExit: 0")


def test_what_a_killed_row_has_started_dies_with_it(limited: TimeLimited, tmp_path: Path) -> None:
    assert isinstance(of(limited, [f"child {tmp_path / 'pids'}"])[0], Failure)
    grandchild, child, server = map(int, (tmp_path / "pids").read_text().split())
    time.sleep(0.2)
    assert not alive(grandchild)
    assert not alive(child)
    assert alive(server)


def test_a_broken_helper_process_fails_its_rows_and_is_replaced(limited: TimeLimited, tmp_path: Path) -> None:
    of(limited, [f"child {tmp_path / 'pids'}"])
    server = int((tmp_path / "pids").read_text().split()[2])
    killer = threading.Timer(0.3, os.kill, (server, 9))
    killer.start()
    found = of(limited, [f"child {tmp_path / 'pids'}", "fine"])
    killer.join()
    assert found == [Failure("its process ended before it was scored"), 1.0]
    child = int((tmp_path / "pids").read_text().split()[1])
    time.sleep(0.2)
    assert not alive(child)  # it has died with its parent
    assert of(limited, ["fine"]) == [1.0]


def test_the_helper_and_its_rows_end_with_the_trainer(limited: TimeLimited, tmp_path: Path) -> None:
    """Here the test is the trainer: it closes its end in the middle of a batch, as its death would."""
    ours, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-P", row_server.__file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    connection = Connection(ours.detach())
    connection.send(spends)
    assert connection.recv_bytes() == b"{}"
    connection.send(({"workers": 2, "seconds": 1000.0}, [("", f"child {tmp_path / 'pids'}", {})]))
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        time.sleep(0.01)
    connection.close()
    assert server.wait(20.0) == 0
    child = int((tmp_path / "pids").read_text().split()[1])
    end = time.monotonic() + 10.0
    while alive(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(child)


def test_one_worker_scores_one_row_after_the_other() -> None:
    running: list[int] = []
    most = 0

    def counted(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        time.sleep(0.02)
        running.pop()
        return [float(responses[0])]

    assert of(TimeLimited(counted, seconds=60.0, workers=1, where="thread"), list("0123")) == [0.0, 1.0, 2.0, 3.0]
    assert most == 1
    of(TimeLimited(counted, seconds=60.0, workers=4, where="thread"), list("0123"))
    assert most > 1


def test_hanging_threads_are_bounded_and_end_the_run() -> None:
    release = threading.Event()

    def hangs(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        release.wait()
        return [1.0]

    reward = TimeLimited(hangs, seconds=0.05, where="thread", max_abandoned=3)
    assert all(isinstance(value, Failure) and value.cause == "wall" for value in of(reward, ["a"] * 3))
    with pytest.raises(RewardBrokenError, match="4 calls of reward hangs hang in threads"):
        score(reward, ["p"], ["a"], [{}])
    release.set()


def test_a_reward_that_cannot_be_sent_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r'not_importable.*where="thread"'):
        TimeLimited(not_importable(), seconds=1.0)
    assert of(TimeLimited(not_importable(), seconds=5.0, where="thread"), ["a"]) == [1.0]


def test_a_reward_that_cannot_be_loaded_ends_the_run() -> None:
    reward = TimeLimited(BreaksWhenLoaded(), seconds=1.0)
    with pytest.raises(
        RewardBrokenError, match=r"BreaksWhenLoaded cannot be loaded.*ModuleNotFoundError: no such module"
    ):
        score(WeightedRewards([(reward, 1.0), (spends, 1.0)]), ["p"], ["a"], [{}])


def test_it_travels_to_other_processes_without_its_helper(limited: TimeLimited) -> None:
    copied = pickle.loads(pickle.dumps(limited))
    assert (copied.reward, copied.seconds, copied.cpu_seconds) == (spends, 2.0, 1)
    assert copied.__name__ == limited.__name__ == "spends"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0}, "seconds must be positive"),
        ({"seconds": 1, "workers": 0}, "workers at least 1"),
        ({"seconds": 1, "where": "elsewhere"}, "where must be one of process, thread"),
        ({"seconds": 1, "where": "thread", "cpu_seconds": 1}, "cpu_seconds must be at least 1 and goes with"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimeLimited(spends, **arguments)
