"""Calls side by side in threads, each under a time limit; one that fails or hangs costs no other its result."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class _Job(Generic[T]):
    """One call: its result, the thread that works at it, and what ends the wait for it."""

    call: Callable[[], T]
    future: Future[T | CallFailure] = field(default_factory=Future)
    thread: threading.Thread | None = None
    limit: threading.Timer | None = None
    over: bool = False


class TimedCalls(Generic[T]):
    """Runs calls. A thread cannot be killed: one over its limit is abandoned, and goes on until it returns.

    Calls may be handed in from several threads; the limits hold for all of them together.

    Args:
        seconds: wall time of a call, from when it is begun.
        workers: calls that run side by side.
        max_abandoned: threads left running, at most.
    """

    def __init__(self, *, seconds: float, workers: int, max_abandoned: int = 16) -> None:
        self.seconds, self.workers, self.max_abandoned = seconds, workers, max_abandoned
        self._lock = threading.Lock()
        self._waiting: deque[_Job[T]] = deque()
        self._running = 0
        self._abandoned: list[threading.Thread] = []

    def submit(self, call: Callable[[], T]) -> Future[T | CallFailure]:
        """Hands a call in, to be begun when a worker is free.

        Returns:
            Its result or failure. It raises EnvironmentBrokenError if the call does, or if more threads hang than
            ``max_abandoned``. Cancelling works until the call is begun.
        """
        job = _Job(call)
        with self._lock:
            self._waiting.append(job)
            self._begin_waiting()
        return job.future

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | CallFailure]:
        """Runs all calls; the results are in their order.

        Raises:
            EnvironmentBrokenError: see `submit`; calls that wait are not begun any more.
        """
        futures = [self.submit(call) for call in calls]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also when the wait is interrupted: what is begun or over stays as it is
            for future in futures:
                future.cancel()
        for future in done:
            if (broken := future.exception()) is not None:
                raise broken
        return [future.result() for future in futures]

    def _begin_waiting(self) -> None:
        """Begins calls while workers are free. The lock is held."""
        while self._waiting and self._running < self.workers:
            job = self._waiting.popleft()
            if not job.future.set_running_or_notify_cancel():
                continue
            self._running += 1
            # daemons: an abandoned thread must not keep the interpreter from ending
            job.thread = threading.Thread(target=self._work, args=(job,), daemon=True)
            job.limit = threading.Timer(self.seconds, self._give_up, args=(job,))
            job.limit.daemon = True
            job.limit.start()
            job.thread.start()

    def _work(self, job: _Job[T]) -> None:
        try:
            value: T | CallFailure | EnvironmentBrokenError = job.call()
        except EnvironmentBrokenError as error:
            value = error
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything; the reason is reported with the row
            value = CallFailure(f"{type(error).__name__}: {error}")
        self._end(job, value)

    def _give_up(self, job: _Job[T]) -> None:
        self._end(job, CallFailure(f"took longer than its limit of {self.seconds:g} s", hangs=True))

    def _end(self, job: _Job[T], value: T | CallFailure | EnvironmentBrokenError) -> None:
        """Settles a call once, by its result or by its limit, whichever comes first."""
        assert job.thread is not None
        assert job.limit is not None
        job.limit.cancel()
        with self._lock:
            if job.over:
                return
            job.over = True
            self._running -= 1
            if isinstance(value, CallFailure) and value.hangs:
                self._abandoned = [*(one for one in self._abandoned if one.is_alive()), job.thread]
                if len(self._abandoned) > self.max_abandoned:
                    value = self._too_many()
        if isinstance(value, EnvironmentBrokenError):
            job.future.set_exception(value)
        else:
            job.future.set_result(value)
        with self._lock:
            self._begin_waiting()

    def _too_many(self) -> EnvironmentBrokenError:
        return EnvironmentBrokenError(
            f"{len(self._abandoned)} calls of environments hang in threads, which cannot be killed; allowed are "
            f"{self.max_abandoned}. Give what an environment waits for a time limit of its own, below "
            f"{self.seconds:g} s."
        )
