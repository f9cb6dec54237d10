"""Served replicas as the manager of the pushes sees them: a checkpoint engine feeds their workers itself."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_rlhf.contracts.replica import Replica, Verb
from lightning_rlhf.weights.receipt import sample_elements
from lightning_rlhf.weights.replica import pack_sample

if TYPE_CHECKING:
    from lightning_rlhf.rollout.replica_seen import Replica as Served
    from lightning_rlhf.rollout.served import ServedRolloutEngine


class ServedReplica(Replica):
    """One replica of a served engine, on the rank that leads.

    Args:
        engine: whose replica.
        served: which one; each of its workers receives for itself.
    """

    def __init__(self, engine: ServedRolloutEngine, served: Served) -> None:
        self.replica_id = f"replica-{served.index}"
        self.receiver_ids = tuple(f"{self.replica_id}/worker-{rank}" for rank in range(served.workers))
        self._engine, self._served = engine, served
        self._before: int | None = None
        self._call: tuple[Verb, Future[dict[str, Any]]] | None = None

    @property
    def weight_version(self) -> int | None:  # type: ignore[override] # the replica's own
        """As the replica said last."""
        return self._served.version

    @override
    def start(self, verb: Verb, **arguments: Any) -> None:
        self._call = (verb, self._engine.start_call(self._do(verb, arguments)))

    @override
    def finish(self, *, timeout: float) -> dict[str, Any]:
        if self._call is None:
            raise RuntimeError("finish() before start(): nothing was asked.")
        (verb, future), self._call = self._call, None
        try:
            return future.result(timeout=timeout)
        except TimeoutError as error:
            future.cancel()
            raise RuntimeError(
                f"Weight sync, phase {verb!r}, peer {self.replica_id!r} at {self._served.client.url}: no answer within "
                f"{timeout:g} s."
            ) from error
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"Weight sync, phase {verb!r}, peer {self.replica_id!r}: {error}") from error

    @override
    def weights_may_change(self) -> None:
        self._before = None

    async def _do(self, verb: Verb, arguments: dict[str, Any]) -> dict[str, Any]:
        client = self._served.client
        if verb == "pause":
            self._before = self._served.version
            await client.pause("abort" if arguments["abort"] or self._engine.in_flight == "resubmit" else "keep")
            await self._put(None)
        elif verb == "load":
            await client.load([{"source": "invitation", "arguments": one} for one in arguments["invitations"]])
        elif verb == "refresh":
            await client.reset_prefix_cache()
        elif verb == "read":
            held = await client.read_weights(arguments["names"])
            return {"samples": {name: pack_sample(sample_elements(tensor)) for name, tensor in held.items()}}
        elif verb == "serve":
            await client.resume()
            await self._put(int(arguments["version"]))
        elif verb == "score":
            return {"log_probs": (await self._engine.score_by(client, [arguments["token_ids"]]))[0]}
        elif verb == "restore" and self._before is not None:
            await client.resume()
            await self._put(self._before)
        elif verb == "retire":
            await self._put(None)
        return {"version": self._served.version}

    async def _put(self, version: int | None) -> None:
        await self._served.client.set_version(version)
        await self._engine.pool.note_version(self._served, version)


def replicas_of(engine: ServedRolloutEngine) -> list[Replica]:
    """The replicas that can be fed now, after a wait for the first one if all are starting; none on other ranks."""
    if not engine.leads:
        return []
    engine.start_call(engine.pool.wait_for_one()).result()
    return [ServedReplica(engine, one) for one in engine.pool.replicas if one.state in ("up", "unready")]


def losses_of(engine: ServedRolloutEngine) -> int:
    """Looks at every replica; how often one was found gone or hanging so far. 0 on a rank that does not lead."""
    if not engine.leads:
        return 0
    engine.start_call(engine.pool.look()).result()
    return engine.pool.losses
