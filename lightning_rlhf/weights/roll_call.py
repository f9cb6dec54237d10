"""Which trainer ranks are missing, found out before they are waited for in a collective that cannot say."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class TrainerRankLostError(RuntimeError):
    """Another rank of the trainer does not answer: nothing that needs all of them can be done any more."""


class RollCall:
    """A barrier of all trainer ranks over gloo, whatever the backend of their default group, that names who is missing.

    Building it is collective.

    Args:
        timeout: longest wait for the last rank, in seconds.
    """

    def __init__(self, *, timeout: float) -> None:
        self.timeout = timeout
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def meet(self, *, phase: str) -> None:
        """Waits until every rank is here. Collective.

        Args:
            phase: of the push, for the message.

        Raises:
            TrainerRankLostError: on rank 0 it names every rank that did not come, on the others it points to rank 0.
        """
        try:
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=self.timeout), wait_all_ranks=True)
        except RuntimeError as error:
            raise TrainerRankLostError(
                f"Weight sync, phase {phase!r}: not every trainer rank came within {self.timeout:g} s. This rank "
                f"({dist.get_rank()}) saw: {error}"
            ) from error
