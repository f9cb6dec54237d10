"""A push that replicas take while the trainer goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from lightning_rlhf.weights.receipt import SentSamples


class UpdateUnderWay:
    """The work of a push that needs no other trainer rank, in a thread of its own.

    The thread does not keep the process alive.

    Args:
        version: the policy version that is on its way.
        work: gives how many tensors were compared, and the largest difference on the probe in nats.
        sent: samples of what is on its way.
    """

    def __init__(self, version: int, work: Callable[[], tuple[int, float]], sent: SentSamples) -> None:
        self.version = version
        self.sent = sent
        self._done: Future[tuple[int, float]] = Future()
        threading.Thread(target=self._run, args=(work,), name=f"weight-sync-{version}", daemon=True).start()

    def _run(self, work: Callable[[], tuple[int, float]]) -> None:
        try:
            self._done.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised by `result`, in the thread that asks)
            self._done.set_exception(error)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended badly; does not wait."""
        return self._done.done() and self._done.exception() is not None

    def failure(self) -> BaseException | None:
        """Waits for the end; what went wrong, if anything did."""
        return self._done.exception()

    def result(self) -> tuple[int, float]:
        """Waits for the end.

        Raises:
            Exception: what went wrong.
        """
        return self._done.result()
