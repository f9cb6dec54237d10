"""The protocol of one weight sync, phase after phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngine
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.contracts.replica import Replica, Verb
from lightning_rlhf.contracts.rollout import RolloutEngine
from lightning_rlhf.weights.receipt import (
    SentSamples,
    check_read_back,
    names_to_read,
    probe_difference,
    probe_log_probs,
)
from lightning_rlhf.weights.replica import LocalReplica, unpack_sample
from lightning_rlhf.weights.roll_call import RollCall, TrainerRankLostError
from lightning_rlhf.weights.update_under_way import UpdateUnderWay

PROBE_TOLERANCE_FP32 = 1e-2
PROBE_TOLERANCE_BF16 = 1.0
MOVED_SHARE = 1e-2
"""Of the tolerance: a trainer whose probe moved by more has moved, beyond what rounding could hide in the replica."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a sync found.

    Attributes:
        version: the policy version that the rollout engine holds now.
        probe_difference: largest log-prob difference on the probe, in nats.
        tensors_compared: tensors whose samples were read back and were equal.
        unchanged: whether no sampled element differs from the sync before.
    """

    version: int
    probe_difference: float
    tensors_compared: int
    unchanged: bool


class CheckpointEngineManager:
    """Brings the trainer's weights into its rollout replicas.

    Replicas may come and go between two pushes (`add`, `remove`).

    Args:
        engine: the actor's engine.
        checkpoint_engine: carries the tensors.
        probe_token_ids: a short sequence that both sides score after each push; at least two ids.
        probe_tolerance: largest difference allowed on it, in nats.
        rollout: the engine that samples in this process, if there is one.
        replicas: those elsewhere that this rank feeds; needs a checkpoint engine that reaches them.
        abort: end the requests in flight instead of letting them wait.
        timeout: longest time that a replica may take for one phase, in seconds.
        rank_timeout: longest time that another trainer rank may be late for a push, or for the next tensor in it, in
            seconds; None leaves it to the process group. Building the manager is then collective.
        feeding: how much later this rank may be, in seconds, since it waits for replicas meanwhile.
    """

    def __init__(
        self,
        *,
        engine: BaseEngine,
        checkpoint_engine: CheckpointEngine,
        probe_token_ids: list[int],
        probe_tolerance: float,
        rollout: RolloutEngine | None = None,
        replicas: Sequence[Replica] = (),
        abort: bool = False,
        timeout: float = 60.0,
        rank_timeout: float | None = None,
        feeding: float = 0.0,
    ) -> None:
        if len(probe_token_ids) < 2:
            raise ValueError(f"The probe needs at least two token ids, got {probe_token_ids}.")
        if (rollout is not None) == checkpoint_engine.remote:
            where, argument = ("to other processes", "replicas") if checkpoint_engine.remote else ("here", "rollout")
            raise ValueError(f"{type(checkpoint_engine).__name__} carries weights {where}: give {argument}=.")
        self.engine = engine
        self.rollout = rollout
        self.checkpoint_engine = checkpoint_engine
        self.replicas: list[Replica] = list(replicas)
        if rollout is not None:
            self.replicas.append(LocalReplica(rollout, checkpoint_engine))
        self.probe_token_ids = probe_token_ids
        self.probe_tolerance = probe_tolerance
        self.abort = abort
        self.timeout = timeout
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._roll_call = (
            RollCall(timeout=rank_timeout, feeding=feeding) if several and rank_timeout is not None else None
        )
        self.num_pushes = 0
        self._copies: dict[str, Tensor] = {}
        self._last_samples: dict[str, Tensor] = {}
        self._last_probe: dict[str, tuple[Tensor, list[float]]] = {}

    def add(self, replica: Replica) -> None:
        """From the next push on, this replica takes part."""
        if any(one.replica_id == replica.replica_id for one in self.replicas):
            raise ValueError(f"There is a replica {replica.replica_id!r} already; remove it first.")
        self.replicas.append(replica)

    def remove(self, replica_id: str) -> None:
        """From the next push on, this replica takes no part."""
        self.replicas = [one for one in self.replicas if one.replica_id != replica_id]

    def ensure_fresh(self, version: int) -> Receipt | None:
        """Pushes if some replica does not hold ``version``. Collective: all ranks decide alike."""
        return self.update_weights(version) if self.is_stale(version) else None

    def is_stale(self, version: int) -> bool:
        """Whether some replica, of any rank, does not hold ``version``. Collective."""
        return self.any_rank(any(replica.weight_version != version for replica in self.replicas))

    def update_weights(self, version: int) -> Receipt:
        """Pushes the trainer's weights. Collective.

        All ranks meet first, so that one that hangs is named. Then, in this order:

        1. pause (or abort): no token is sampled while weights change; the replicas have no version until the push is
           whole; they give the cache's memory back and wake the weights'
        2. prepare, topology, group
        3. send and receive, in buckets
        4. finalize
        5. reset the prefix cache, which older weights filled
        6. read back samples; restore the cache's memory; resume; set the version
        7. score the probe on both sides

        A failure leaves each replica on its old version if none of its weights were touched, else without one: it
        refuses to generate. All ranks raise, and none is left in a collective.

        Raises:
            RuntimeError: if a replica is gone, silent or failed, or the receipt does not hold; the message names the
                peer and phase, the tensor, or the difference.
            TrainerRankLostError: if another rank is missing, or gone in the middle; replicas keep their old version in
                the first case.
        """
        self._meet()
        sent = SentSamples()
        parameters = self._gather()
        failure: Exception | None = None
        compared = 0
        try:
            if self.replicas:
                self._ask_all("pause", abort=self.abort)
                compared = self._bring(version, sent, sent.watch(parameters))
        except Exception as error:  # noqa: BLE001 (raised by _agree, once the other ranks know)
            failure = error
            self._tell_all("restore")
        failure = self._drain(parameters) or failure
        self._agree(failure)
        trainer = self._trainer_probe()
        difference = 0.0
        try:
            difference = self._compare_probe(trainer, version)
        except Exception as error:  # noqa: BLE001 (raised by _agree)
            failure = error
        self._agree(failure)
        return self._receipt(version, sent, compared=compared, difference=difference)

    def start_update(self, version: int) -> UpdateUnderWay:
        """Begins a push that replicas take from a copy of the weights, while the caller goes on. Collective.

        When this returns on the rank that feeds replicas, they stand still: what is asked of them from now on is
        sampled from the new weights. That rank keeps room for one copy of the model. No other push may begin before
        `finish_update`.

        Raises:
            RuntimeError: if the weights could not be gathered.
            TrainerRankLostError: as in `update_weights`.
        """
        self._meet()
        sent = SentSamples()
        parameters = self._gather()
        copied: dict[str, Tensor] = {}
        failure: Exception | None = None
        try:
            copied = self._copy(sent.watch(parameters))
        except Exception as error:  # noqa: BLE001 (raised by _agree, once the other ranks know)
            failure = error
        failure = self._drain(parameters) or failure
        self._agree(failure)
        trainer = self._trainer_probe()
        paused: Exception | None = None
        try:
            self._ask_all("pause", abort=self.abort)
        except RuntimeError as error:  # raised in `finish_update`, where all ranks hear of it
            paused = error

        def work() -> tuple[int, float]:
            try:
                if paused is not None:
                    raise paused
                compared = self._bring(version, sent, iter(copied.items())) if self.replicas else 0
            except Exception:
                self._tell_all("restore")
                raise
            return compared, self._compare_probe(trainer, version)

        return UpdateUnderWay(version, work, sent)

    def finish_update(self, update: UpdateUnderWay) -> Receipt:
        """Waits for the end of a push that was begun. Collective.

        Raises:
            RuntimeError: as in `update_weights`; what was sampled meanwhile may be of weights that do not hold.
        """
        self._agree(update.failure())
        compared, difference = update.result()
        return self._receipt(update.version, update.sent, compared=compared, difference=difference)

    def _receipt(self, version: int, sent: SentSamples, *, compared: int, difference: float) -> Receipt:
        unchanged = self._note_changes(sent.samples)
        self.num_pushes += 1
        return Receipt(version=version, probe_difference=difference, tensors_compared=compared, unchanged=unchanged)

    def _meet(self) -> None:
        if self._roll_call is not None:
            self._roll_call.meet(phase="meet")

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this push, one at a time. Collective."""
        parameters = self.engine.get_per_tensor_param()
        if self._roll_call is None:
            return parameters
        return self._roll_call.gather(parameters, patience=self.checkpoint_engine.patience)

    @staticmethod
    def _drain(parameters: Iterator[tuple[str, Tensor]]) -> Exception | None:
        """Each tensor is gathered by all ranks: the others wait for this one even if it has no use for the rest."""
        try:
            deque(parameters, maxlen=0)
        except RuntimeError as error:
            return error
        return None

    def drop_copies(self) -> None:
        """Frees what `start_update` has kept; no push may be under way."""
        self._copies = {}

    def _copy(self, parameters: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies in memory that is kept from push to push; none on a rank that feeds no replica. Collective."""
        before, self._copies = self._copies, {}
        for name, tensor in parameters:
            if not self.replicas:
                continue
            kept = before.pop(name, None)
            if kept is None or (kept.shape, kept.dtype, kept.device) != (tensor.shape, tensor.dtype, tensor.device):
                kept = torch.empty_like(tensor, requires_grad=False)
            self._copies[name] = kept.copy_(tensor.detach())
        return self._copies

    def _bring(self, version: int, sent: SentSamples, parameters: Iterator[tuple[str, Tensor]]) -> int:
        """Gives replicas that stand still the tensors, and lets them go on; how many of these were read back."""
        carrier = self.checkpoint_engine
        carrier.prepare()
        receivers = [receiver for replica in self.replicas for receiver in replica.receiver_ids]
        # seen from here there is one sender, this rank, and the receivers of its own replicas
        topology = carrier.build_topology(trainer_world_size=1, receiver_ids=receivers)
        for replica in self.replicas:
            invited = replica.receiver_ids if carrier.remote else ()
            replica.start("load", invitations=[carrier.invitation(name).to_json() for name in invited])
        carrier.init_process_group(topology)
        for replica in self.replicas:
            replica.weights_may_change()
        carrier.send_weights(parameters)
        for replica in self.replicas:
            replica.finish(timeout=self.timeout)
        carrier.finalize()
        self._ask_all("refresh")
        compared = self._read_back(sent, version)
        self._ask_all("serve", version=version)
        return compared

    def _read_back(self, sent: SentSamples, version: int) -> int:
        compared = 0
        answers = self._ask_all("read", names=names_to_read(sent.samples, version=version))
        for replica, answer in zip(self.replicas, answers, strict=True):
            held = {name: unpack_sample(values) for name, values in answer["samples"].items()}
            compared += check_read_back(sent.samples, held, version=version, where=replica.replica_id)
        return compared

    def _ask_all(self, verb: Verb, **arguments: Any) -> list[dict[str, Any]]:
        for replica in self.replicas:
            replica.start(verb, **arguments)
        return [replica.finish(timeout=self.timeout) for replica in self.replicas]

    def _tell_all(self, verb: Verb) -> None:
        """Asks those that are still there, whatever they answer; a dead one does not keep it from the others."""
        for replica in self.replicas:
            with suppress(RuntimeError):
                replica.start(verb)
        for replica in self.replicas:
            with suppress(RuntimeError):
                replica.finish(timeout=self.timeout)

    def _trainer_probe(self) -> Tensor:
        """The trainer's log-probs on the probe. Collective."""
        with nullcontext() if self._roll_call is None else self._roll_call.bounded(phase="probe"):
            return probe_log_probs(self.engine, self.probe_token_ids)

    def _compare_probe(self, trainer: Tensor, version: int) -> float:
        """Has the replicas score the probe; the largest difference in nats. Without success they do not serve."""
        try:
            answers = [one["log_probs"] for one in self._ask_all("score", token_ids=self.probe_token_ids)]
            difference = max((probe_difference(trainer, answer) for answer in answers), default=0.0)
            if not difference <= self.probe_tolerance:
                raise RuntimeError(
                    f"Weight sync to version {version}: trainer and rollout engine differ by {difference:.3g} nats on "
                    f"the probe (allowed {self.probe_tolerance:g}), though the tensors read back are equal. What "
                    f"cannot be read back is stale: a fused or tied weight, or the prefix cache."
                )
            self._check_moved(trainer, answers, version)
        except Exception:
            self._tell_all("retire")
            raise
        return difference

    def _check_moved(self, trainer: Tensor, answers: list[list[float]], version: int) -> None:
        """A replica whose every log-prob is the last push's, to the bit, though the trainer's moved, got nothing new.

        It finds what reading back cannot see and the probe's tolerance lets pass: small steps, an adapter's above all.
        """
        for replica, answer in zip(self.replicas, answers, strict=True):
            last_trainer, last_answer = self._last_probe.get(replica.replica_id, (trainer, None))
            moved = (trainer - last_trainer).abs().max().item()
            if answer == last_answer and moved > MOVED_SHARE * self.probe_tolerance:
                raise RuntimeError(
                    f"Weight sync to version {version}: the trainer's log-probs on the probe moved by up to "
                    f"{moved:.3g} nats since the last push, those of the rollout engine ({replica.replica_id}) by "
                    f"nothing at all: it still samples with the old weights."
                )
        self._last_probe = {
            replica.replica_id: (trainer, answer) for replica, answer in zip(self.replicas, answers, strict=True)
        }

    def _agree(self, failure: BaseException | None) -> None:
        """Raises on every rank if some rank failed, so that none waits for it in its next collective."""
        if isinstance(failure, TrainerRankLostError):
            self._tell_all("retire")
            raise failure
        try:
            failed = self.any_rank(failure is not None, phase="agree")
        except TrainerRankLostError:
            self._tell_all("retire")
            raise
        except RuntimeError as error:
            self._tell_all("retire")
            first = failure or error
            raise TrainerRankLostError(
                f"Weight sync: another trainer rank is gone or silent; this rank saw {type(first).__name__}: {first}"
            ) from first
        if failure is not None:
            raise failure
        if failed:
            self._tell_all("retire")
            raise RuntimeError("The weight sync failed on another rank; its own message says how.")

    def any_rank(self, flag: bool, *, phase: str = "meet") -> bool:
        """Whether ``flag`` is true on some rank. Collective.

        Raises:
            TrainerRankLostError: if another rank is missing.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return flag
        if self._roll_call is not None:
            return self._roll_call.any_rank(flag, phase=phase)
        value = torch.tensor([int(flag)], device=self.engine.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    def exchange(self, number: int, *, phase: str, seconds: float) -> list[int]:
        """A number of every rank, by rank; all wait for each other at most so long. Collective.

        Raises:
            RuntimeError: of a manager without ``rank_timeout``, or of one rank.
            TrainerRankLostError: if another rank is missing.
        """
        if self._roll_call is None:
            raise RuntimeError("Only a manager with rank_timeout= knows the other ranks, of which there must be some.")
        return self._roll_call.exchange(number, phase=phase, seconds=seconds)

    def _note_changes(self, samples: dict[str, Tensor]) -> bool:
        last, self._last_samples = self._last_samples, samples
        return bool(last) and all(name in last and tensor.equal(last[name]) for name, tensor in samples.items())
