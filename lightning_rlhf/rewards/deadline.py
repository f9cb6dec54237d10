"""A limit on how long a plain function may take, so that one that hangs is no end to the run."""

from __future__ import annotations

import functools
import signal
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_rlhf.rewards.scores import RewardBrokenError

T = TypeVar("T")

MAX_ABANDONED = 16
"""Threads that may be left running in a call that does not return."""

_abandoned: list[threading.Thread] = []


class OverDeadlineError(BaseException):
    """A call took too long. Not an ``Exception``: a reward's own ``except Exception`` must not swallow it."""


@dataclass(frozen=True, kw_only=True)
class FunctionLimits:
    """How long a plain function may take.

    Attributes:
        batch_seconds: wall time of the call with all rows; a function that is over it is called row by row.
        row_seconds: wall time of a call with one row; over it the row has failed.
    """

    batch_seconds: float = 300.0
    row_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if not (self.batch_seconds > 0 and self.row_seconds > 0):
            raise ValueError(
                f"batch_seconds and row_seconds must be positive (math.inf for no limit), got {self.batch_seconds} and "
                f"{self.row_seconds}."
            )


class LimitedFunction:
    """A function with limits of its own in place of the default ones.

    Args:
        function: a reward, ``(prompts, responses, metadata) -> rewards``.
        batch_seconds: see ``FunctionLimits``; ``math.inf`` for none.
        row_seconds: likewise.
    """

    def __init__(
        self,
        function: Callable[[list[str], list[str], list[dict[str, Any]]], Any],
        *,
        batch_seconds: float = FunctionLimits.batch_seconds,
        row_seconds: float = FunctionLimits.row_seconds,
    ) -> None:
        self.function = function
        self.limits = FunctionLimits(batch_seconds=batch_seconds, row_seconds=row_seconds)

    @property
    def __name__(self) -> str:
        """That of the function."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def __call__(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> Any:
        """What the function gives."""
        return self.function(prompts, responses, metadata)


def limits_of(reward: object) -> FunctionLimits | None:
    """Limits of a function; None for an object of another class, which says itself how long it may take."""
    if isinstance(reward, LimitedFunction):
        return reward.limits
    if isinstance(reward, functools.partial):
        return limits_of(reward.func)
    return FunctionLimits() if isinstance(reward, types.FunctionType | types.MethodType) else None


def call_within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """Calls the function, and gives up on it after so many seconds.

    In the main thread an alarm (``SIGALRM``) raises within the call, wherever Python can be interrupted: in a sleep, in
    a wait for a lock, a socket or a process, between bytecodes; not within one long operation of an extension. In any
    other thread the call is made in a further one, which is abandoned when it is over.

    Args:
        seconds: of wall time; infinity calls it as it is.
        function: what to call.
        arguments: with which.

    Raises:
        OverDeadlineError: if the call took too long.
        RewardBrokenError: if too many threads are abandoned.
    """
    if seconds == float("inf"):
        return function(*arguments)
    if threading.current_thread() is threading.main_thread():
        return _call_under_alarm(seconds, function, *arguments)
    return _call_in_thread(seconds, function, *arguments)


def _call_under_alarm(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    armed = True

    def over(_number: int, _frame: types.FrameType | None) -> None:
        if armed:
            raise OverDeadlineError(f"over its limit of {seconds:g} s")

    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    if 0 < remaining <= seconds:  # somebody else's alarm, and an earlier one: it is the limit
        return function(*arguments)
    begun, handler = time.monotonic(), signal.signal(signal.SIGALRM, over)
    # again every second: the call may be in a ``finally`` that waits for what hangs
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            return function(*arguments)
        finally:
            armed = False  # an alarm may come before this line; the next is a second away
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if remaining > 0:
            left = max(remaining - (time.monotonic() - begun), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _call_in_thread(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    found: list[T] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            found.append(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            raised.append(error)

    # daemon: an abandoned thread must not keep the interpreter from ending
    thread = threading.Thread(target=call, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if found:
        return found[0]
    _abandoned[:] = [*(one for one in _abandoned if one.is_alive()), thread]
    if len(_abandoned) > MAX_ABANDONED:
        raise RewardBrokenError(
            f"{len(_abandoned)} calls of rewards hang in threads, which cannot be killed. Wrap the reward in "
            'TimeLimited(where="process"), whose calls are.'
        )
    raise OverDeadlineError(f"over its limit of {seconds:g} s; its thread is abandoned")
