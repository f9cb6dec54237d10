"""Pushes in the middle of a rollout, for replicas that have started again and wait for weights.

A trainer of one rank pushes whenever it sees the need. With several, a checkpoint engine's push needs all of them, as
all gather the tensors, but only the rank that leads sees the replicas, and each waits for responses of its own. So as
long as a rollout lasts they meet in rounds: every half second while they wait, and as soon as they are done. Each round
ends alike on all ranks: with a push, an error, the end, or more waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from typing_extensions import override

LOOK_SECONDS = 0.5
WAITS, DONE, NEEDS_PUSH, FAILED = range(4)
"""What a rank says of itself in a round."""


class Pushes:
    """Those of a trainer of one rank.

    Args:
        needed: whether this rank's replicas wait for weights, and nothing is sampled until they get them.
        push: pushes. Collective.
    """

    def __init__(self, *, needed: Callable[[], bool], push: Callable[[], None]) -> None:
        self._needed, self._push = needed, push

    @property
    def may_come(self) -> bool:
        """Whether those who wait for responses may hope for one."""
        return True

    def session(self) -> AbstractContextManager[None]:
        """What a rollout is within, see `RolloutEngine.session`."""
        return nullcontext()

    def look(self) -> None:
        """Pushes if there is need; for those who wait for responses, every now and then."""
        if self._needed():
            self._push()

    def watch(self, groups: Sequence[Future[Any]]) -> None:
        """Looks every now and then, until all of ``groups`` are done; raises the error of the first that fails."""
        while True:
            done, under_way = wait(groups, LOOK_SECONDS, return_when=FIRST_EXCEPTION)
            for group in done:
                group.result()  # raises what ends the rollout, without a wait for the others
            if not under_way:
                return
            self.look()


class PushRounds(Pushes):
    """Those of a trainer of several ranks; one object on each.

    Args:
        exchange: gives what every rank says, by rank. Collective.
        needed: see `Pushes`.
        push: see `Pushes`.
    """

    def __init__(
        self, *, exchange: Callable[[int], Sequence[int]], needed: Callable[[], bool], push: Callable[[], None]
    ) -> None:
        super().__init__(needed=needed, push=push)
        self._exchange = exchange
        self._is_open = False
        self._others_know = False

    @property
    @override
    def may_come(self) -> bool:
        return self._is_open

    @override
    @contextmanager
    def session(self) -> Iterator[None]:
        """Within it ranks may wait different numbers of times; at its end each stays until all are done. Collective.

        Raises:
            RuntimeError: if another rank failed within it.
        """
        self._is_open, self._others_know = True, False
        try:
            yield
            while not self._round(DONE):
                pass
        except (Exception, KeyboardInterrupt):
            if not self._others_know:
                self._exchange(FAILED)
            raise
        finally:
            self._is_open = False

    @override
    def look(self) -> None:
        """A round of a rank that waits; nothing outside a session. Collective."""
        if self._is_open:
            self._round(WAITS)

    def _round(self, state: int) -> bool:
        """Whether all are done."""
        try:
            said = self._exchange(NEEDS_PUSH if self._needed() else state)
            if FAILED in said:
                raise RuntimeError(f"Rank {said.index(FAILED)} has failed in this rollout; its own message says how.")
            if NEEDS_PUSH in said:
                self._push()
        except BaseException:
            self._others_know = True
            raise
        return all(one == DONE for one in said)
