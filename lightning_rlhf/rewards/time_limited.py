"""A reward whose rows are scored side by side, each under a time limit, so that a stuck one holds nothing up."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Literal, TypeAlias, get_args

from lightning_rlhf.rewards.function import RewardFunction, reward_name, row_value
from lightning_rlhf.rewards.row_client import RowClient
from lightning_rlhf.rewards.row_server import RowLimits
from lightning_rlhf.rewards.scores import Failure, RewardBrokenError

Where: TypeAlias = Literal["process", "thread"]


class TimeLimited:
    """Calls a reward for each row by itself; a row that takes too long or raises fails, and no other.

    With ``where="process"`` rows are scored in children of a helper process, and one that is over its limit is killed
    with all that it has started. With ``where="thread"`` they are scored in threads of this process; a thread cannot be
    killed, so one that is over its limit is abandoned: it goes on until it returns, holding its memory and competing
    for the interpreter, and after ``max_abandoned`` of them the run ends with an error. A batch takes at most
    ``rows / workers`` times ``seconds``.

    Args:
        reward: a callable ``(prompts, responses, metadata) -> rewards``; called with lists of one.
        seconds: wall time of a row, from when it is begun.
        workers: rows scored side by side.
        where: ``"process"`` asks for a reward that can be imported (no lambda, nothing of ``__main__``); state that it
            keeps between rows is lost.
        cpu_seconds: processor time of a row, in whole seconds; with ``"process"`` alone.
        memory_bytes: memory a row may add; with ``"process"`` alone.
        max_abandoned: threads left running, at most.

    Raises:
        ValueError: for numbers that cannot be meant.
        TypeError: if the reward cannot be sent to another process.
    """

    def __init__(
        self,
        reward: RewardFunction,
        *,
        seconds: float,
        workers: int = 8,
        where: Where = "process",
        cpu_seconds: int | None = None,
        memory_bytes: int | None = None,
        max_abandoned: int = 16,
    ) -> None:
        if not seconds > 0 or workers < 1 or max_abandoned < 0:
            raise ValueError(
                f"seconds must be positive, workers at least 1 and max_abandoned at least 0; got {seconds}, {workers} "
                f"and {max_abandoned}."
            )
        if where not in get_args(Where):
            raise ValueError(f"where must be one of {', '.join(get_args(Where))}, got {where!r}.")
        for limit, value in (("cpu_seconds", cpu_seconds), ("memory_bytes", memory_bytes)):
            if value is not None and (where == "thread" or value < 1):
                raise ValueError(
                    f'{limit} must be at least 1 and goes with where="process"; got {value} and {where!r}.'
                )
        self.reward = reward
        self.seconds = seconds
        self.workers = workers
        self.where: Where = where
        self.cpu_seconds, self.memory_bytes = cpu_seconds, memory_bytes
        self.max_abandoned = max_abandoned
        self._abandoned: list[threading.Thread] = []
        self._client = self._new_client() if where == "process" else None

    @property
    def __name__(self) -> str:
        """That of the reward."""
        return reward_name(self.reward)

    def __call__(
        self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]
    ) -> list[float | Failure]:
        """Scores the rows, failures as ``Failure``.

        Raises:
            RewardBrokenError: if the reward cannot be loaded in another process, or more threads hang than
                ``max_abandoned``.
        """
        rows = list(zip(prompts, responses, metadata, strict=True))
        return self._client.score(rows) if self._client is not None else self._score_in_threads(rows)

    def start(self) -> None:
        """Starts the helper process now rather than with the first batch."""
        if self._client is not None:
            self._client.start()

    def close(self) -> None:
        """Ends the helper process; a later batch starts another."""
        if self._client is not None:
            self._client.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_abandoned": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._client = self._new_client() if self.where == "process" else None

    def _new_client(self) -> RowClient:
        limits = RowLimits(
            workers=self.workers,
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            memory_bytes=self.memory_bytes,
        )
        return RowClient(self.reward, limits=limits, name=reward_name(self.reward))

    def _score_in_threads(self, rows: list[tuple[str, str, dict[str, Any]]]) -> list[float | Failure]:
        found: list[float | Failure] = [Failure("not scored")] * len(rows)
        answers: queue.SimpleQueue[tuple[int, float | Failure]] = queue.SimpleQueue()
        waiting, running = list(range(len(rows)))[::-1], dict[int, tuple[threading.Thread, float]]()
        while waiting or running:
            while waiting and len(running) < self.workers:
                row = waiting.pop()
                # daemon: an abandoned thread must not keep the interpreter from ending
                thread = threading.Thread(target=self._answer, args=(row, rows[row], answers), daemon=True)
                running[row] = (thread, time.monotonic() + self.seconds)
                thread.start()
            try:
                row, value = answers.get(timeout=max(0.0, min(end for _, end in running.values()) - time.monotonic()))
                if row in running:  # else it came after its end, and has failed already
                    found[row] = value
                    del running[row]
            except queue.Empty:
                pass
            for row in [row for row, (_, end) in running.items() if time.monotonic() >= end]:
                found[row] = Failure(f"over its limit of {self.seconds:g} s; its thread is abandoned", "wall")
                self._abandon(running.pop(row)[0])
        return found

    def _answer(
        self,
        row: int,
        content: tuple[str, str, dict[str, Any]],
        answers: queue.SimpleQueue[tuple[int, float | Failure]],
    ) -> None:
        try:
            value = row_value(self.reward, *content)
        except (ValueError, RewardBrokenError) as error:
            value = Failure(str(error))
        answers.put((row, value))

    def _abandon(self, thread: threading.Thread) -> None:
        self._abandoned = [*(one for one in self._abandoned if one.is_alive()), thread]
        if len(self._abandoned) > self.max_abandoned:
            raise RewardBrokenError(
                f"{len(self._abandoned)} calls of reward {reward_name(self.reward)} hang in threads, which cannot be "
                f'killed; max_abandoned is {self.max_abandoned}. Use where="process", whose calls are killed.'
            )
