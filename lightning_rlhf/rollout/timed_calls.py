"""Calls side by side in threads, each under a time limit; one that fails or hangs costs no other its result."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_rlhf.contracts.environment import EnvironmentBrokenError

T = TypeVar("T")


@dataclass(frozen=True)
class CallFailure:
    """In place of a call's result.

    Attributes:
        reason: for people.
        hangs: whether the call still runs.
    """

    reason: str
    hangs: bool = False


class TimedCalls(Generic[T]):
    """Runs calls. A thread cannot be killed: one over its limit is abandoned, and goes on until it returns.

    Args:
        seconds: wall time of a call, from when it is begun.
        workers: calls that run side by side.
        max_abandoned: threads left running, at most.
    """

    def __init__(self, *, seconds: float, workers: int, max_abandoned: int = 16) -> None:
        self.seconds, self.workers, self.max_abandoned = seconds, workers, max_abandoned
        self._abandoned: list[threading.Thread] = []

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | CallFailure]:
        """Runs all calls; the results are in their order.

        Raises:
            EnvironmentBrokenError: if a call raises it, or more threads hang than ``max_abandoned``.
        """
        found: list[T | CallFailure] = [CallFailure("not run")] * len(calls)
        answers: queue.SimpleQueue[tuple[int, T | CallFailure | EnvironmentBrokenError]] = queue.SimpleQueue()
        waiting, running = list(range(len(calls)))[::-1], dict[int, tuple[threading.Thread, float]]()
        while waiting or running:
            while waiting and len(running) < self.workers:
                index = waiting.pop()
                # daemon: an abandoned thread must not keep the interpreter from ending
                thread = threading.Thread(target=_answer, args=(index, calls[index], answers), daemon=True)
                running[index] = (thread, time.monotonic() + self.seconds)
                thread.start()
            first_end = min(end for _, end in running.values())
            try:
                index, value = answers.get(timeout=max(0.0, first_end - time.monotonic()))
            except queue.Empty:
                for late in [index for index, (_, end) in running.items() if time.monotonic() >= end]:
                    found[late] = CallFailure(f"took longer than its limit of {self.seconds:g} s", hangs=True)
                    self._abandon(running.pop(late)[0])
                continue
            if isinstance(value, EnvironmentBrokenError):
                raise value
            if index in running:
                found[index] = value
                del running[index]
        return found

    def _abandon(self, thread: threading.Thread) -> None:
        self._abandoned = [*(one for one in self._abandoned if one.is_alive()), thread]
        if len(self._abandoned) > self.max_abandoned:
            raise EnvironmentBrokenError(
                f"{len(self._abandoned)} calls of environments hang in threads, which cannot be killed; allowed are "
                f"{self.max_abandoned}. Give what an environment waits for a time limit of its own, below "
                f"{self.seconds:g} s."
            )


def _answer(
    index: int,
    call: Callable[[], T],
    answers: queue.SimpleQueue[tuple[int, T | CallFailure | EnvironmentBrokenError]],
) -> None:
    try:
        value: T | CallFailure | EnvironmentBrokenError = call()
    except EnvironmentBrokenError as error:
        value = error
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything; the reason is reported with the row
        value = CallFailure(f"{type(error).__name__}: {error}")
    answers.put((index, value))
