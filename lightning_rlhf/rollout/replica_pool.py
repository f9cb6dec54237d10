"""All replicas as one: who is in service, who is started again, where requests go, and that each is answered once.

States of a replica::

    starting ──► unready ──► up ──► down ──► starting ...      (down ──► dead: started again too often)
                 no weights of   │
                 the version     └── sampling; leaves `up` when it dies, hangs, or its weights are replaced

Only `up` takes requests. The trainer's first rank leads: it alone starts, kills and loads replicas; other ranks look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning_rlhf.rollout.replica_client import (
    ReplicaClient,
    ReplicaLostError,
    ReplicaRefusedError,
    ReplicaUnreadyError,
)
from lightning_rlhf.rollout.replica_fleet import ReplicaFleet
from lightning_rlhf.rollout.replica_seen import Replica, State
from lightning_rlhf.rollout.requests import Ledger, PendingRequest
from lightning_rlhf.rollout.routing import Router

FAST_SECONDS = 0.1
Load = Callable[[ReplicaClient], Awaitable[None]]


class ReplicaPool:
    """Used in one event loop.

    Args:
        clients: one for each replica.
        fleet: starts them, on the leading rank of a run that has its own; else they are somebody else's.
        leads: whether this rank brings weights to replicas.
        offset: where the router begins among equals.
        max_deaths: how often one replica may be started again.
        start_seconds: longest time from its start until it answers; also the longest wait for any replica to serve.
        check_seconds: between two looks at a replica that is up.
        max_losses: how often one request may be lost with its replica before the run stops.

    Attributes:
        losses: how often a replica that had answered was found gone or hanging.
    """

    def __init__(
        self,
        clients: Sequence[ReplicaClient],
        *,
        fleet: ReplicaFleet | None,
        leads: bool,
        offset: int = 0,
        max_deaths: int = 3,
        start_seconds: float = 300.0,
        check_seconds: float = 1.0,
        max_losses: int = 5,
    ) -> None:
        self.replicas = [Replica(index=index, client=client) for index, client in enumerate(clients)]
        self.ledger = Ledger()
        self.version: int | None = None
        self.losses = 0
        self._fleet = fleet
        self._leads = leads
        self._router = Router(len(clients), offset=offset)
        self._max_deaths = max_deaths
        self._start_seconds = start_seconds
        self._check_seconds = check_seconds
        self._max_losses = max_losses
        self._changed = asyncio.Condition()
        self._loading = asyncio.Lock()
        self._load: Load | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Begins to watch; starts the fleet's replicas."""
        for replica in self.replicas:
            replica.started = asyncio.get_running_loop().time()
            if self._fleet is not None:
                self._fleet.start(replica.index)
            self._tasks.append(asyncio.create_task(self._watch(replica)))

    async def close(self) -> None:
        """Ends the watch."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            await replica.client.close()

    def describe(self) -> str:
        """The state of every replica, for messages."""
        return "; ".join(
            f"replica {r.index} at {r.client.url} is {r.state} ({r.note or f'version {r.version}'})"
            for r in self.replicas
        )

    # --- watching ----------------------------------------------------------------------------------------------------

    async def _watch(self, replica: Replica) -> None:
        while replica.state != "dead":
            try:
                status = await replica.client.health()
            except ReplicaRefusedError as error:
                replica.refused = str(error)
                self.losses += replica.state in ("up", "unready")
                await self._set(replica, "down", str(error))
            except (RuntimeError, ValueError) as error:
                await self._unreachable(replica, str(error))
            else:
                replica.hears(status)
                if replica.state in ("starting", "down"):
                    await self._answers_again(replica, status.weight_version)
                else:
                    await self._judge(replica, status.weight_version)
            replica.wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_seconds if replica.state == "up" else FAST_SECONDS):
                    await replica.wake.wait()

    async def _judge(self, replica: Replica, version: int | None) -> None:
        """Decides by its version whether an answering replica serves."""
        replica.version = version
        serves = version is not None and version == self.version
        note = "" if serves else f"its weights are of version {version}, wanted is {self.version}"
        await self._set(replica, "up" if serves else "unready", note)

    async def _answers_again(self, replica: Replica, version: int | None) -> None:
        self._router.forget(replica.index)
        if self._leads and self._load is not None and (version is None or version != self.version):
            async with self._loading:
                if not await self._bring_current(replica):
                    return
                version = self.version
        await self._judge(replica, version)

    async def _bring_current(self, replica: Replica) -> bool:
        """Gives a replica the weights of the last push; False if that failed."""
        assert self._load is not None
        try:
            await self._load(replica.client)
            await replica.client.set_version(self.version)
        except ReplicaLostError:
            return False  # the next look tells what became of it
        except (RuntimeError, ValueError) as error:
            await self._set(replica, "down", f"it could not load the current weights: {error}")
            return False
        return True

    async def _unreachable(self, replica: Replica, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if replica.state in ("starting", "down"):
            if now - replica.started < self._start_seconds:
                replica.note = why
                return
            why = f"it did not answer within {self._start_seconds:g} s of its start: {why}"
        self.losses += replica.state in ("up", "unready")
        replica.started = now
        await self._set(replica, "down", why)
        if self._fleet is not None:
            self._fleet.kill(replica.index)  # what hangs cannot be helped; `exited` follows

    async def exited(self, index: int, how: str) -> None:
        """A replica of the fleet has ended; it is started again unless it dies too often."""
        replica = self.replicas[index]
        if self._fleet is None:
            return
        replica.deaths += 1
        self.losses += replica.state in ("up", "unready")
        replica.version = None
        if replica.deaths > self._max_deaths:
            await self._set(replica, "dead", f"it ended {replica.deaths} times, the last time {how}")
            return
        await self._set(replica, "starting", f"it ended ({how}) and is started again")
        replica.started = asyncio.get_running_loop().time()
        self._fleet.start(index)

    async def _set(self, replica: Replica, state: State, note: str) -> None:
        async with self._changed:
            if replica.state != "dead":  # a look that began before its end
                replica.state, replica.note = state, note
            self._changed.notify_all()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def run(self, group: Sequence[PendingRequest], *, push_may_come: bool = True) -> None:
        """Has every request of a group answered, once, by whatever replicas; the answers are in the requests.

        Args:
            group: the requests.
            push_may_come: whether weights may be pushed while these wait; a replica without weights is no hope if not.

        Raises:
            RuntimeError: if no replica can serve, or a request was lost too often.
        """
        self.ledger.accept(group)
        waiting = {request.request_id: request for request in group}
        while waiting:
            size = len(waiting)
            replica = await self._acquire(group[0].prompt, size, push_may_come=push_may_come)
            try:
                await self._send(replica, waiting)
            except ReplicaLostError as error:
                await self._after_loss(replica, waiting, error)
            finally:
                self._router.done(replica.index, size=size)
        self.ledger.settle(group)

    async def _acquire(self, prompt: Sequence[int], size: int, *, push_may_come: bool) -> Replica:
        async with self._changed:
            try:
                async with asyncio.timeout(self._start_seconds):
                    await self._changed.wait_for(
                        lambda: self._available() or self._hopeless(push_may_come=push_may_come)
                    )
            except TimeoutError:
                raise RuntimeError(
                    f"No replica could take requests within {self._start_seconds:g} s: {self.describe()}."
                ) from None
            if not self._available():
                remedy = (
                    ""
                    if self._hopeless()
                    else (
                        " One that has started again gets its weights at the next push, which cannot come while this "
                        "rollout waits. More replicas help, and WeightSync(engine='naive'), which keeps a snapshot."
                    )
                )
                raise RuntimeError(f"No replica is left to take requests: {self.describe()}.{remedy}")
            return self.replicas[self._router.pick(prompt, size=size, available=self._available())]

    def _available(self) -> list[int]:
        return [replica.index for replica in self.replicas if replica.state == "up"]

    def _hopeless(self, *, push_may_come: bool = True) -> bool:
        needy = () if push_may_come else self.without_weights()
        return all(replica.state == "dead" or replica in needy for replica in self.replicas)

    def without_weights(self) -> list[Replica]:
        """Those that have started again, and that only a push can bring weights."""
        if not self._leads or self._load is not None:
            return []
        return [replica for replica in self.replicas if replica.state == "unready" and replica.version is None]

    def waits_for_push(self) -> bool:
        """Whether nothing will be sampled until weights are pushed."""
        return self._hopeless(push_may_come=False) and not self._hopeless()

    async def _send(self, replica: Replica, waiting: dict[str, PendingRequest]) -> None:
        bodies = [request.body() for request in waiting.values()]
        async for line in replica.client.generate(bodies):
            request = waiting.get(line["request_id"])
            if request is None:
                self.ledger.duplicates += 1
            elif request.take(line):
                del waiting[request.request_id]

    async def _after_loss(
        self, replica: Replica, waiting: Mapping[str, PendingRequest], error: ReplicaLostError
    ) -> None:
        if replica.state == "up":
            await self._set(replica, "unready", str(error))
        replica.wake.set()  # look at it now
        if isinstance(error, ReplicaUnreadyError):  # it refused them: nothing was lost
            return
        self.ledger.resent += len(waiting)
        for request in waiting.values():
            request.losses += 1
        worn = [request for request in waiting.values() if request.losses >= self._max_losses]
        if worn:
            raise RuntimeError(
                f"{len(worn)} request(s), {worn[0].request_id} among them, were lost {self._max_losses} times; "
                f"{self.describe()}."
            ) from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests wherever they are."""
        await self._all(lambda client: client.abort(request_ids))

    # --- weights -----------------------------------------------------------------------------------------------------

    @property
    def longest_wait(self) -> float:
        """Until a replica has started and loaded weights, in seconds."""
        return self._start_seconds + max(replica.client.load_seconds for replica in self.replicas)

    async def pause(self, mode: str) -> None:
        """Has every replica that serves stop between two tokens."""
        await self._all(lambda client: client.pause(mode))

    async def resume(self) -> None:
        """Goes on."""
        await self._all(lambda client: client.resume())

    async def load(self, load: Load) -> None:
        """Has every replica load a push, side by side; those that are down get it when they are back.

        Raises:
            RuntimeError: if a replica that answers could not load it: it stays out of service.
        """
        async with self._loading:
            self._load = load
            await self._all(load)

    async def set_version(self, version: int | None) -> None:
        """Names the version of the weights; until replicas say that they hold it, they take no requests."""
        self.version = version
        if self._leads:
            await self._all(lambda client: client.set_version(version))
        for replica in self.replicas:
            if replica.state == "up":
                await self._set(replica, "unready", "its weights are being replaced")
            if replica.state == "unready":
                if self._leads:
                    await self._judge(replica, version)
                replica.wake.set()

    async def expect_version(self, version: int) -> None:
        """The version of a push that replicas were told of one by one: one that started meanwhile does not have it."""
        self.version = version
        for replica in self.replicas:
            if replica.state in ("up", "unready"):
                if self._leads:
                    await self._judge(replica, replica.version)
                else:
                    await self._set(replica, "unready", "its weights are being replaced")
                replica.wake.set()

    async def note_version(self, replica: Replica, version: int | None) -> None:
        """One replica was told its version by somebody else than `set_version`."""
        await self._judge(replica, version)

    async def look(self) -> None:
        """Finds out which replicas are gone or hang; those are out of service afterwards, and started again."""
        await self._all(lambda client: client.health())

    async def wait_for_one(self) -> None:
        """Waits until some replica answers, or none ever will, or the longest time of a start is over."""
        with suppress(TimeoutError):
            async with self._changed, asyncio.timeout(self._start_seconds):
                await self._changed.wait_for(
                    lambda: self._hopeless() or any(replica.state in ("unready", "up") for replica in self.replicas)
                )

    async def ask_all(self, call: Callable[[ReplicaClient], Awaitable[Any]]) -> list[Any]:
        """One answer of each replica that answers at all."""
        return await self._all(call)

    async def _all(self, call: Callable[[ReplicaClient], Awaitable[Any]]) -> list[Any]:
        there = [replica for replica in self.replicas if replica.state in ("up", "unready")]
        results = await asyncio.gather(*(call(replica.client) for replica in there), return_exceptions=True)
        answers = []
        for replica, result in zip(there, results, strict=True):
            if isinstance(result, ReplicaLostError):
                await self._unreachable(replica, str(result))
            elif isinstance(result, BaseException):
                raise RuntimeError(f"Replica {replica.index}: {result}") from result
            else:
                answers.append(result)
        return answers

    async def wait_until_answering(self) -> None:
        """Waits until every replica has answered once.

        Raises:
            RuntimeError: if one does not in time, or what answers is not a replica of this run.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(self._start_seconds):
                    await self._changed.wait_for(
                        lambda: (
                            all(replica.state in ("unready", "up", "dead") for replica in self.replicas)
                            or any(replica.refused for replica in self.replicas)
                        )
                    )
            except TimeoutError:
                raise RuntimeError(
                    f"Not every replica answered within {self._start_seconds:g} s: {self.describe()}."
                ) from None
        for replica in self.replicas:
            if replica.refused:
                raise RuntimeError(f"Replica {replica.index} cannot be used: {replica.refused}")
        if self._hopeless():
            raise RuntimeError(f"No replica could be started: {self.describe()}.")
