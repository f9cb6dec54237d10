"""Calls in threads: what is left when the wait for them is interrupted."""

from __future__ import annotations

import threading
import time

import pytest

from lightning_rlhf.rollout import timed_calls
from lightning_rlhf.rollout.timed_calls import TimedCalls


def test_calls_that_wait_are_not_begun_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    go_on = threading.Event()

    def first() -> str:
        begun.append("first")
        assert go_on.wait(10)
        return "first"

    def interrupted(*unused: object, **named: object) -> None:
        raise KeyboardInterrupt

    calls = TimedCalls[str](seconds=10, workers=1)
    with monkeypatch.context() as patched:
        patched.setattr(timed_calls, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls.run([first, lambda: begun.append("second") or "second"])
    go_on.set()
    assert calls.run([lambda: "third"]) == ["third"]  # the worker is free again
    time.sleep(0.05)
    assert begun == ["first"]
