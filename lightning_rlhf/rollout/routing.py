"""Which replica takes a group of requests: the one with the least in flight, or the one that knows the prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class Router:
    """Counts what is in flight, and remembers who saw which prompt.

    Args:
        num_replicas: replicas, by index.
        offset: where equals are tried from, so that the ranks of a run do not all begin with the first.
        slack: requests that the one which knows the prompt may have in flight beyond the least; its cache of the
            prompt's keys and values saves their computation, until waiting costs more.
        memory: prompts remembered.
    """

    def __init__(self, num_replicas: int, *, offset: int = 0, slack: int = 16, memory: int = 4096) -> None:
        if num_replicas < 1:
            raise ValueError(f"There must be at least one replica, got {num_replicas}.")
        self.in_flight = [0] * num_replicas
        self._offset = offset
        self._slack = slack
        self._memory = memory
        self._seen: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def pick(self, prompt: Collection[int], *, size: int, available: Collection[int]) -> int:
        """Chooses among ``available``, and counts ``size`` requests there until `done`.

        Raises:
            ValueError: if none is available.
        """
        if not available:
            raise ValueError("No replica is available.")
        count = len(self.in_flight)
        least = min(available, key=lambda index: (self.in_flight[index], (index - self._offset) % count))
        key = tuple(prompt)
        known = self._seen.get(key)
        if known is not None and known in available and self.in_flight[known] <= self.in_flight[least] + self._slack:
            least = known
        self._seen[key] = least
        self._seen.move_to_end(key)
        while len(self._seen) > self._memory:
            self._seen.popitem(last=False)
        self.in_flight[least] += size
        return least

    def done(self, replica: int, *, size: int) -> None:
        """Takes ``size`` requests off what is in flight."""
        self.in_flight[replica] -= size

    def forget(self, replica: int) -> None:
        """The replica lost its cache: it started again, or has new weights."""
        for key in [key for key, index in self._seen.items() if index == replica]:
            del self._seen[key]
