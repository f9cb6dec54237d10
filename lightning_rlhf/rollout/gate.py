"""When an engine may sample: pause, abort, sleep and the weights' version, the same for every in-process engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PARTS = ("weights", "kv_cache")


class SamplingGate:
    """The states of an engine whose ``generate`` runs in the caller's thread.

    ``generate`` holds `requests` for its whole length and `step` around each token, and asks `goes_on` between two
    tokens. `pause`, `abort` and weight loading come from other threads; ``pause`` returns when no token is being
    computed, so that weights may then change under requests that wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = threading.Lock()
        self._in_flight = False
        self._paused = False
        self._aborted = False
        self._asleep: set[str] = set()

    @property
    def in_flight(self) -> bool:
        """Whether requests are being sampled, or wait in a pause."""
        return self._in_flight

    @property
    def asleep(self) -> tuple[str, ...]:
        """The parts that are asleep: of ``weights`` and ``kv_cache``."""
        return tuple(part for part in PARTS if part in self._asleep)

    @contextmanager
    def requests(self, weight_version: int | None) -> Iterator[int]:
        """Lets one ``generate`` or ``score`` through.

        Yields:
            The version of the weights.

        Raises:
            RuntimeError: if there are no valid weights, or the engine sleeps, is paused or busy.
        """
        with self._changed:
            if self._asleep:
                raise RuntimeError(f"The rollout engine sleeps ({', '.join(self.asleep)}); call wake_up() first.")
            if weight_version is None:
                raise RuntimeError(
                    "The rollout engine has no valid weights: none were pushed, a push failed half-way, or a deep "
                    "sleep dropped them. Push weights (load_weights, then weight_version) before sampling."
                )
            if self._paused:
                raise RuntimeError("The rollout engine is paused; resume() first: it samples in the caller's thread.")
            if self._in_flight:
                raise RuntimeError("The rollout engine samples in another thread; it takes one call at a time.")
            self._in_flight, self._aborted = True, False
        try:
            yield weight_version
        finally:
            with self._changed:
                self._in_flight = self._aborted = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Holds off `pause` while a token is computed."""
        with self._step:
            yield

    def goes_on(self) -> bool:
        """Waits while paused; False once the requests are to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or not self._paused)
            return not self._aborted

    def pause(self) -> None:
        """Stops sampling; returns when no token is being computed."""
        with self._changed:
            self._paused = True
        with self._step:
            pass

    def resume(self) -> None:
        """Goes on."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self) -> None:
        """Ends the requests in flight at the next token; without any, does nothing."""
        with self._changed:
            self._aborted = self._in_flight
            self._changed.notify_all()

    def sleep(self, level: int) -> None:
        """Puts weights and cache to sleep.

        Raises:
            ValueError: for a level other than 1 and 2.
            RuntimeError: while requests are in flight.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}: 1 keeps the weights on the host, 2 drops them.")
        with self._changed:
            if self._in_flight:
                raise RuntimeError("The rollout engine cannot sleep while it samples; abort() or wait first.")
            self._asleep = set(PARTS)

    def wake_up(self, tags: Sequence[str] | None) -> tuple[str, ...]:
        """Wakes the named parts, all for None.

        Returns:
            The parts that slept until now.

        Raises:
            ValueError: for an unknown tag.
        """
        unknown = sorted(set(tags or ()) - set(PARTS))
        if unknown:
            raise ValueError(f"Unknown sleep tags {unknown}; there are {PARTS}.")
        with self._changed:
            woken = tuple(part for part in self.asleep if tags is None or part in tags)
            self._asleep -= set(woken)
        return woken
