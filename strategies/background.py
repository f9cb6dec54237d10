"""One checkpoint that is written while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


class BackgroundSave:
    """Runs one writer at a time in a thread; what it raises is raised where the next one waits for it.

    The thread is no daemon: a process that ends in good order ends after its checkpoint is whole.
    """

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    @property
    def pending(self) -> bool:
        """Whether a writer was started that nobody has waited for."""
        return self._thread is not None

    def start(self, write: Callable[[], None]) -> None:
        """Starts ``write`` and returns.

        Raises:
            RuntimeError: if another is pending.
        """
        if self.pending:
            raise RuntimeError("A checkpoint is still being written; wait() for it first.")
        self._thread = Thread(target=self._run, args=(write,), name="checkpoint-writer")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - raised again by wait(), in the thread that can end the run
            self._failure = error

    def wait(self) -> bool:
        """Returns once nothing is being written: whether there was a writer.

        Raises:
            BaseException: what the writer raised.
        """
        if self._thread is None:
            return False
        self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            raise failure
        return True
