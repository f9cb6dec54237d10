"""Rollout by replicas in processes of their own, behind the contract of an engine in this process."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import threading
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig, request_seed
from lightning_rlhf.rollout.model_directory import ModelDirectory
from lightning_rlhf.rollout.push_rounds import Pushes
from lightning_rlhf.rollout.replica_agreement import check_room, coarsest_dtype, same_scores, same_tensors
from lightning_rlhf.rollout.replica_client import ReplicaClient
from lightning_rlhf.rollout.replica_fleet import ReplicaFleet
from lightning_rlhf.rollout.replica_pool import ReplicaPool
from lightning_rlhf.rollout.replica_process import ReplicaConfig
from lightning_rlhf.rollout.requests import PendingRequest
from lightning_rlhf.rollout.responses import RolloutCounters, check_scored, response_budget
from lightning_rlhf.rollout.rows import build_row, end_ids
from lightning_rlhf.rollout.vllm_request import sampling_arguments
from lightning_rlhf.rollout.vllm_transfer import SNAPSHOT, update_info
from lightning_rlhf.rollout.weight_snapshot import WeightSnapshot
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence

T = TypeVar("T")
SCORING = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}


class ServedRolloutEngine(RolloutEngine):
    """Sends requests to replicas over HTTP; one object on each rank of the trainer, of which one leads.

    The leading rank brings weights: into a folder on this machine's memory (``snapshot_directory``), from which
    replicas load them, also those that start again.

    Args:
        model: directory (or cached name) with config and tokenizer.
        urls: of the replicas.
        token: that they ask for.
        max_model_len: limit on prompt and response together; the replicas' own.
        fleet_configs: how to build replicas; given on the leading rank of a run that starts its own. ``urls`` and
            ``token`` are then the fleet's.
        leads: whether this rank brings weights.
        rank: of this process; spreads ranks over replicas and keeps their requests' ids apart.
        in_flight: what an update of the weights does to requests: ``keep`` has them go on where they are, with keys
            and values computed again; ``resubmit`` ends them and sends prompt and partial response anew.
        snapshot_directory: where weights are put; None: ``/dev/shm`` if there is one, else the temporary folder.
        pool_settings: more of `ReplicaPool`.
        client_settings: more of `ReplicaClient`.

    Attributes:
        counters: prompts skipped and samples dropped so far.
        leads: whether this rank brings weights.
        pushes: of the current weights, while responses are waited for; set by who can bring them.
    """

    pushes: Pushes | None = None

    def __init__(
        self,
        model: str | Path,
        *,
        max_model_len: int,
        urls: Sequence[str] = (),
        token: str = "",
        fleet_configs: Sequence[ReplicaConfig] = (),
        leads: bool = True,
        rank: int = 0,
        in_flight: str = "keep",
        snapshot_directory: str | Path | None = None,
        pool_settings: Mapping[str, Any] | None = None,
        client_settings: Mapping[str, Any] | None = None,
    ) -> None:
        if in_flight not in ("keep", "resubmit"):
            raise ValueError(f"in_flight={in_flight!r}: expected 'keep' or 'resubmit'.")
        if bool(urls) == bool(fleet_configs):
            raise ValueError("Replicas are given either by urls= (and token=) or by fleet_configs=.")
        self.directory = ModelDirectory.read(model)
        self.max_model_len = max_model_len
        self.counters = RolloutCounters()
        self.in_flight = in_flight
        self.leads = leads
        self._serials = itertools.count()
        self._prefix = f"{rank}-{secrets.token_hex(4)}"
        self._version: int | None = None
        self._pending: dict[str, PendingRequest] = {}
        self._snapshot: WeightSnapshot | None = None
        parent = snapshot_directory or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self._snapshots = TemporaryDirectory(prefix="lightning_rlhf_weights_", dir=parent)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()
        self._fleet = (
            ReplicaFleet(fleet_configs, folder=self._snapshots.name, on_exit=self._on_exit) if fleet_configs else None
        )
        self.urls = tuple(self._fleet.urls if self._fleet is not None else urls)
        self.token = self._fleet.token if self._fleet is not None else token
        self._closed = False
        self._pool: ReplicaPool | None = None
        try:
            if self._fleet is not None:
                self._fleet.wait_for_host()
            self._pool = self._wait(self._open(rank, dict(pool_settings or {}), dict(client_settings or {})))
            self._wait(self.pool.wait_until_answering())
            check_room(self.pool.replicas, max_model_len=max_model_len)
        except BaseException:
            self.shutdown()
            raise

    @property
    def pool(self) -> ReplicaPool:
        """The replicas as this rank sees them."""
        if self._pool is None:
            raise RuntimeError("The rollout engine was not built to the end.")
        return self._pool

    async def _open(self, rank: int, pool: dict[str, Any], client: dict[str, Any]) -> ReplicaPool:
        clients = [ReplicaClient(url, token=self.token, **client) for url in self.urls]
        made = ReplicaPool(clients, fleet=self._fleet, leads=self.leads, offset=rank, **pool)
        made.open()
        return made

    @property
    @override
    def compute_dtype(self) -> torch.dtype:
        """As the replicas say; bfloat16 if one of them computes in it."""
        return coarsest_dtype(self.pool.replicas)

    def _on_exit(self, index: int, how: str) -> None:
        if not self._closed:
            asyncio.run_coroutine_threadsafe(self.pool.exited(index, how), self._loop)

    def start_call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins a coroutine in the loop that speaks to the replicas."""
        if self._closed:
            coroutine.close()
            raise RuntimeError("The rollout engine was shut down.")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for what bounds itself in time."""
        return self.start_call(coroutine).result()

    # --- sampling ----------------------------------------------------------------------------------------------------

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, rl_step: int) -> Rollouts:
        """Draws ``sampling.n`` responses for each prompt; see `RolloutEngine.generate`.

        Raises:
            RuntimeError: if there are no valid weights, or no replica can serve.
        """
        if self._version is None:
            raise RuntimeError("The rollout engine has no valid weights: none were pushed, or a push failed half-way.")
        may_come = self.pushes is not None and self.pushes.may_come
        how: dict[str, Any] = {"rl_step": rl_step, "version": self._version, "push_may_come": may_come}
        groups = [self.start_call(self._group(prompts, index, sampling, **how)) for index in range(len(prompts))]
        try:
            if self.pushes is not None:
                self.pushes.watch(groups)
            sequences = [sequence for group in groups for sequence in group.result()]
        finally:
            for group in groups:
                group.cancel()
        return Rollouts.from_sequences(sequences, temperature=sampling.temperature or 1.0)

    def push_if_none_serves(self) -> None:
        """Brings weights to replicas that have started again without any, if no other one is left to sample."""
        if self.pushes is not None:
            self.pushes.look()

    @contextmanager
    def session(self) -> Iterator[None]:
        """See `RolloutEngine.session`: all ranks are there for a push that they must make together."""
        with nullcontext() if self.pushes is None else self.pushes.session():
            yield

    def start_group(
        self, prompts: PromptBatch, index: int, sampling: SamplingConfig, *, rl_step: int, version: int
    ) -> Future[list[RolloutSequence]]:
        """Begins the responses of one prompt; the result has them by sample index.

        Args:
            prompts: the prompts of a step.
            index: which of them.
            sampling: how responses are drawn.
            rl_step: the step that the requests' seeds are made from.
            version: the version that the rows are tagged with, where their tokens say nothing else.
        """
        return self.start_call(self._group(prompts, index, sampling, rl_step=rl_step, version=version))

    async def _group(
        self,
        prompts: PromptBatch,
        index: int,
        sampling: SamplingConfig,
        *,
        rl_step: int,
        version: int,
        push_may_come: bool = True,
    ) -> list[RolloutSequence]:
        prompt = list(prompts.prompt_token_ids[index])
        budget = response_budget(len(prompt), max_model_len=self.max_model_len, max_new_tokens=sampling.max_new_tokens)
        self.counters.skipped_prompts += budget == 0
        ends = end_ids(self.directory, sampling)
        requests = [
            self._request(
                prompt,
                sampling_arguments(
                    sampling,
                    seed=request_seed(sampling.seed, rl_step=rl_step, uid=prompts.uids[index], sample_index=sample),
                    budget=budget,
                    end_token_ids=ends,
                ),
            )
            for sample in range(sampling.n if budget else 0)
        ]
        await self._answer(requests, push_may_come=push_may_come)
        return [
            build_row(
                prompts,
                index,
                sample_index=sample,
                response=requests[sample].response() if budget else None,
                sampling=sampling,
                policy_version=version,
                directory=self.directory,
                counters=self.counters,
            )
            for sample in range(sampling.n)
        ]

    def _request(self, prompt: list[int], params: dict[str, Any]) -> PendingRequest:
        return PendingRequest(request_id=f"{self._prefix}-{next(self._serials)}", prompt=prompt, params=params)

    async def _answer(self, requests: Sequence[PendingRequest], *, push_may_come: bool = True) -> None:
        if not requests:
            return
        mine = {request.request_id: request for request in requests}
        self._pending.update(mine)
        try:
            await self.pool.run(requests, push_may_come=push_may_come)
        finally:
            for request_id in mine:
                del self._pending[request_id]

    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of each id given those before it; see `RolloutEngine.score`.

        The leading rank asks every replica, and they must agree.

        Raises:
            ValueError: for a temperature other than 1, which vLLM's servers do not score at; if a sequence is empty, or
                longer than ``max_model_len``.
            RuntimeError: if replicas differ.
        """
        check_scored(token_ids, longest=self.max_model_len, temperature=temperature)
        if temperature != 1:
            raise ValueError(f"Replicas score at temperature 1 only, got {temperature}.")
        return self._wait(self._score(token_ids))

    async def _score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        if not self.leads:
            requests = [self._request(list(ids), dict(SCORING)) for ids in token_ids]
            await asyncio.gather(*(self._answer([request]) for request in requests))
            return [request.prompt_log_probs or [] for request in requests]
        answers: list[list[list[float]]] = await self.pool.ask_all(lambda client: self.score_by(client, token_ids))
        if not answers:
            raise RuntimeError(f"No replica is there to score a sequence: {self.pool.describe()}.")
        return same_scores(answers, describe=self.pool.describe)

    async def score_by(self, client: ReplicaClient, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """What one replica says; see `score`. To be awaited in the engine's own loop."""
        requests = [self._request(list(ids), dict(SCORING)) for ids in token_ids]
        found = {
            line["request_id"]: line["prompt_log_probs"]
            async for line in client.generate([request.body() for request in requests])
        }
        return [found[request.request_id] for request in requests]

    # --- weights -----------------------------------------------------------------------------------------------------

    @property
    @override
    def longest_wait(self) -> float:
        """Of the leading rank: until a replica has started, and has loaded weights."""
        return self.pool.longest_wait if self.leads else 0.0

    @property
    def weight_version(self) -> int | None:
        """Version of the replicas' weights; setting it puts them into service, or out of it with None."""
        return self._version

    @weight_version.setter
    def weight_version(self, version: int | None) -> None:
        self._version = version
        self._wait(self.pool.set_version(version))

    def expect_version(self, version: int) -> None:
        """Sends requests from now on to the replicas that say that they hold ``version``; tells none that it does."""
        self._version = version
        self._wait(self.pool.expect_version(version))

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Brings weights to all replicas; on other ranks than the leading one it only drains the tensors.

        Raises:
            RuntimeError: if a replica could not load them.
            OSError: if there is no space for them.
        """
        if not self.leads:
            deque(named_tensors, maxlen=0)
            return
        parent = Path(self._snapshots.name)
        snapshot = WeightSnapshot.write(named_tensors, parent=parent, version=next(self._serials))
        before, self._snapshot = self._snapshot, snapshot
        info = update_info(SNAPSHOT, folder=str(snapshot.folder))
        try:
            self._wait(self.pool.load(lambda client: client.load(info)))
        finally:
            if before is not None:
                before.remove()

    def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """What the replicas hold under these names; all must hold the same. Empty on other ranks than the leading one.

        Raises:
            RuntimeError: naming a tensor in which two replicas differ.
        """
        if not self.leads:
            return {}

        async def ask(client: ReplicaClient) -> dict[str, Tensor]:
            return await client.read_weights(names)

        return same_tensors(self._wait(self.pool.ask_all(ask)))

    def reset_prefix_cache(self) -> None:
        """Has every replica forget its keys and values."""
        if self.leads:
            self._wait(self.pool.ask_all(lambda client: client.reset_prefix_cache()))

    # --- control -----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Ends the requests of this rank; what they have is kept."""
        pending = list(self._pending.values())
        for request in pending:
            request.final_abort = True
        self._wait(self.pool.abort([request.request_id for request in pending]))

    def pause(self) -> None:
        """Has every replica stop between two tokens; with ``in_flight="resubmit"`` what is in flight ends there."""
        if self.leads:
            self._wait(self.pool.pause("keep" if self.in_flight == "keep" else "abort"))

    def resume(self) -> None:
        """Goes on."""
        if self.leads:
            self._wait(self.pool.resume())

    def sleep(self, level: int = 1) -> None:
        """Refused: replicas have devices of their own.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("Served replicas have devices of their own and do not sleep for the trainer.")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Replicas are always awake."""

    def release_kv_cache(self) -> None:
        """Forgets the caches' content; their memory stays with the replicas."""
        self.reset_prefix_cache()

    def shutdown(self) -> None:
        """Ends the replicas that this object has started. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._version = None
        if self._pool is not None:
            asyncio.run_coroutine_threadsafe(self._pool.close(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if self._fleet is not None:
            self._fleet.shutdown()
        self._snapshots.cleanup()
