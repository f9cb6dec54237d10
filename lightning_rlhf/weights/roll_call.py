"""Which trainer ranks are missing in a push: every wait for them ends in time, with their names.

A collective cannot say for whom it waits, and its group's timeout is long: it must outlast a slow step of training. So
ranks meet before they go into collectives together, in a roll call that names those who do not come; collectives of a
push have the push's own limit; and after one that has failed the ranks that are left meet once more, and name the
others. None of it needs an answer from a rank that hangs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d

from lightning_rlhf.contracts.process_groups import BESIDE_TRAINING

GRACE_SECONDS = 60.0
"""After a collective that has waited in vain, in which the other waiting ranks find out as well."""


class TrainerRankLostError(RuntimeError):
    """Another rank of the trainer does not answer: nothing that needs all of them can be done any more."""


class RollCall:
    """Meetings of all trainer ranks over gloo, whatever the backend of their default group.

    Building it is collective.

    Args:
        timeout: longest wait for a rank, in seconds.
        feeding: how much longer than that this rank may be late, in seconds, since it waits for replicas meanwhile.
    """

    def __init__(self, *, timeout: float, feeding: float = 0.0) -> None:
        self.timeout = timeout
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        everyones = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, torch.tensor([feeding], dtype=torch.float64), group=self._group)
        longest = max((float(one) for rank, one in enumerate(everyones) if rank != dist.get_rank()), default=0.0)
        self._limit = timeout + longest
        self._others_feed = longest > 0
        self._some_feed = self._others_feed or feeding > 0
        self._moved = 0.0

    def exchange(self, number: int, *, phase: str, seconds: float) -> list[int]:
        """What every rank says, by rank. Collective.

        Args:
            number: of this rank.
            phase: for the message.
            seconds: longest wait for the others.

        Raises:
            TrainerRankLostError: as in `meet`.
        """
        self._meet(phase, seconds=seconds)
        everyones = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, torch.tensor([number]), group=self._group)
        return [int(one) for one in everyones]

    def meet(self, *, phase: str) -> None:
        """Waits until every rank is here. Collective.

        Args:
            phase: of the push, for the message.

        Raises:
            TrainerRankLostError: on rank 0 it names every rank that did not come, on the others it points to rank 0.
        """
        self._meet(phase, seconds=self._limit)

    def _meet(self, phase: str, *, seconds: float, cause: Exception | None = None) -> None:
        try:
            self._call(seconds)
        except RuntimeError as error:
            before = "" if cause is None else f" after a collective had failed here ({type(cause).__name__}: {cause})"
            raise TrainerRankLostError(
                f"Weight sync, phase {phase!r}: not every trainer rank came within {seconds:g} s{before}. This rank "
                f"({dist.get_rank()}) saw: {error}"
            ) from (cause or error)

    def _call(self, seconds: float) -> None:
        """Rank 0 hears from everybody, and tells everybody that all are there.

        As torch's `monitored_barrier` does, which however lets a rank wait for rank 0 by the group's timeout alone.
        """
        end = time.monotonic() + seconds

        def left() -> timedelta:
            return timedelta(seconds=max(0.001, end - time.monotonic()))

        if dist.get_rank() != 0:
            try:
                _wait(dist.isend(torch.ones(1), 0, group=self._group), left())
                _wait(dist.irecv(torch.ones(1), 0, group=self._group), left())
            except RuntimeError as error:
                raise RuntimeError(
                    f"no word that all are there from rank 0, which knows who is missing: {error}"
                ) from error
            return
        heard = {rank: dist.irecv(torch.ones(1), rank, group=self._group) for rank in range(1, dist.get_world_size())}
        missing = {}
        for rank, work in heard.items():
            try:
                _wait(work, left())
            except RuntimeError as error:
                missing[rank] = str(error)
        if missing:
            with suppress(RuntimeError):  # closes all connections of the group: the others need not wait any longer
                _wait(
                    dist.irecv(torch.ones(1), next(iter(missing)), group=self._group, tag=1), timedelta(milliseconds=1)
                )
            raise RuntimeError(f"rank {', '.join(map(str, missing))} did not come ({next(iter(missing.values()))})")
        for rank in heard:
            _wait(dist.isend(torch.ones(1), rank, group=self._group), left())

    def any_rank(self, flag: bool, *, phase: str) -> bool:
        """Whether ``flag`` is true on some rank. Collective.

        Raises:
            TrainerRankLostError: as in `meet`.
        """
        self.meet(phase=phase)
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return bool(value.item())

    def gather(self, parameters: Iterator[tuple[str, Tensor]], *, patience: float) -> Iterator[tuple[str, Tensor]]:
        """Yields what ``parameters`` does, each gathered by all ranks, of which none is waited for without end.

        Args:
            parameters: see `BaseEngine.get_per_tensor_param`.
            patience: how long a rank that sends them on may wait for those who receive them, beside its lateness.

        Raises:
            TrainerRankLostError: as in `bounded`.
        """
        if self._some_feed:
            self.meet(phase="gather")  # before it replicas have their time; within it they have ``patience``
        with self.bounded(phase="gather", patience=patience if self._some_feed else 0.0):
            for named_tensor in parameters:
                yield named_tensor
                self._moved = time.monotonic()

    @contextmanager
    def bounded(self, *, phase: str, patience: float = 0.0) -> Iterator[None]:
        """Within it a collective, of whatever group of this process, waits at most ``timeout + patience`` seconds.

        Each single one, so that ranks may take as long as they need if they go on. With NCCL it is torch's own watchdog
        that ends the process then.

        Args:
            phase: of the push, for the message.
            patience: how much longer a rank that feeds replicas may take from one collective to the next, in seconds.

        Raises:
            TrainerRankLostError: if a collective failed, and not every rank comes to a meeting after it.
        """
        limit = self.timeout + (patience if self._others_feed else 0.0)
        limits = _limit_collectives(timedelta(seconds=limit))
        self._moved = time.monotonic()
        try:
            yield
        except TrainerRankLostError:
            raise
        except RuntimeError as error:
            # Those who waited in vain have company soon: the others wait in collectives of the same push. One that
            # failed at once, perhaps alone, has to wait until theirs have run out.
            in_vain = time.monotonic() - self._moved >= limit
            grace = min(self.timeout, GRACE_SECONDS) + patience
            self._meet(phase, seconds=grace + (0.0 if in_vain else limit), cause=error)
            raise
        finally:
            for backend, before in limits.items():
                backend._set_default_timeout(before)


def _wait(work: dist.Work | None, limit: timedelta) -> None:
    if work is None:
        raise RuntimeError("This process is not in the group of the roll call.")
    work.wait(limit)


def _limit_collectives(limit: timedelta) -> dict[Backend, timedelta]:
    """Gives all groups of this process, but those that are used beside training, a timeout; what each had before."""
    before: dict[Backend, timedelta] = {}
    for group in list(distributed_c10d._world.pg_map):
        if group.group_desc == BESIDE_TRAINING:
            continue
        for device in group._device_types:
            backend = group._get_backend(device)
            if backend not in before:
                before[backend] = backend.options._timeout
    for backend, own in before.items():
        backend._set_default_timeout(min(own, limit))
    return before
