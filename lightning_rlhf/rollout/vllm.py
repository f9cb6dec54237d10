"""vLLM inside the trainer's process: one engine per rank, weights replaced in place, its model whole or shared."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig, TensorRows, request_seed
from lightning_rlhf.rng import preserved_rng
from lightning_rlhf.rollout.gate import SamplingGate
from lightning_rlhf.rollout.model_directory import ModelDirectory
from lightning_rlhf.rollout.responses import RolloutCounters, check_scored, response_budget
from lightning_rlhf.rollout.rows import build_row, end_ids
from lightning_rlhf.rollout.vllm_build import build_llm_engine, engine_arguments, length_with_room_to_score
from lightning_rlhf.rollout.vllm_group import (
    Ask,
    build_group_engine,
    check_group_size,
    group_of_engine,
    read_own_rows,
)
from lightning_rlhf.rollout.vllm_process import (
    default_group,
    fenced_process,
    guarded_groups,
    import_vllm,
)
from lightning_rlhf.rollout.vllm_request import VLLMRequest, refusals_named, sampling_arguments
from lightning_rlhf.rollout.vllm_weights import load_in_place, read_own
from lightning_rlhf.types import PromptBatch, Rollouts

_T = TypeVar("_T")


class VLLMEngine(RolloutEngine):
    """One vLLM engine in this process, on one device, with the whole model or a share of it.

    Ranks of a process group each build their own, all at the same time: vLLM makes subgroups of the default group.
    Build it after the strategy has set that group up. A process holds one engine at a time; shut it down before
    building the next. What vLLM changes in the process is put back (`fenced_process`).

    Args:
        model: directory (or cached name) with config and tokenizer.
        dtype: ``float32`` or ``bfloat16``, of weights, compute and cache. bfloat16 alone moves log-probs by up to
            some tenths.
        max_model_len: limit on prompt and response together.
        max_num_seqs: requests that are sampled side by side.
        kv_cache_bytes: memory of the cache; at least one sequence of full length must fit.
        enable_prefix_caching: share keys and values of equal beginnings, such as the prompt of a group.
        load_format: ``dummy`` reads no checkpoint, since weights are pushed before anything is sampled.
        logprobs_mode: ``processed_logprobs`` are those that a token is drawn from, at the sampling temperature.
        seed: base of the engine's own seed. Requests carry their own (`request_seed`), so it decides no sample.
        replica_index: which engine of the run this is; added to the seed, so that engine seeds differ.
        tensor_parallel_size: neighbouring ranks of the default process group that share the model (`vllm_group`): they
            have one replica index, `generate` and `score` are collective over them, and `session` bounds a rollout.
        local_rank: number of this rank's device, as torch counts those that the process sees; None: the one that the
            process computes on.
        engine_kwargs: more of vLLM's ``EngineArgs``; it refuses unknown ones.

    Attributes:
        counters: prompts skipped and samples dropped so far.
        engine_seed: the engine's own seed.

    Raises:
        ImportError: without vLLM; names the extra to install.
        RuntimeError: if this process has another engine.
    """

    _living: weakref.ref[VLLMEngine] | None = None

    def __init__(
        self,
        model: str | Path,
        *,
        max_model_len: int,
        kv_cache_bytes: int,
        dtype: str = "float32",
        max_num_seqs: int = 64,
        enable_prefix_caching: bool = True,
        load_format: str = "dummy",
        logprobs_mode: str = "processed_logprobs",
        seed: int = 0,
        replica_index: int = 0,
        tensor_parallel_size: int = 1,
        local_rank: int | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        other = VLLMEngine._living() if VLLMEngine._living is not None else None
        if other is not None:
            raise RuntimeError(
                "This process has a VLLMEngine already; shutdown() it before building another: vLLM keeps its parallel "
                "state in module globals, and the end of one engine breaks the other."
            )
        self.directory = ModelDirectory.read(model)
        self.max_model_len = max_model_len
        self.counters = RolloutCounters()
        self.engine_seed = seed + replica_index
        self._names = self.directory.weight_names()
        self._gate = SamplingGate()
        self._serial = itertools.count()
        arguments = engine_arguments(
            self.directory,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_bytes=kv_cache_bytes,
            enable_prefix_caching=enable_prefix_caching,
            load_format=load_format,
            logprobs_mode=logprobs_mode,
            seed=self.engine_seed,
            engine_kwargs=engine_kwargs,
        )
        self._dtype: torch.dtype = getattr(torch, dtype)
        shared = tensor_parallel_size > 1
        if shared:
            check_group_size(tensor_parallel_size, engine_kwargs=engine_kwargs or {})
        with fenced_process():
            import_vllm()
            self._vllm: Any = (
                build_group_engine(arguments, tensor_parallel_size=tensor_parallel_size, local_rank=local_rank)
                if shared
                else build_llm_engine(arguments, local_rank=local_rank)
            )
            built_in = default_group()
        self._group = group_of_engine() if shared else None
        # If the engine is dropped without shutdown(), vLLM's own finalizer would take the default group with it.
        self._finalizer = weakref.finalize(self, _shut_down, self._vllm, built_in)
        VLLMEngine._living = weakref.ref(self)

    @property
    @override
    def compute_dtype(self) -> torch.dtype:
        """As asked for."""
        return self._dtype

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, rl_step: int) -> Rollouts:
        """Draws ``sampling.n`` responses for each prompt, one request each; see `RolloutEngine.generate`.

        With top-p, top-k or min-p the log-probs are those of the distribution that is left, as sampled. Greedy
        log-probs (temperature 0) are those at temperature 1.
        """
        rows: list[tuple[int, int, Ask | None]] = []
        with self._gate.requests(self.weight_version) as version:
            for index, prompt in enumerate(prompts.prompt_token_ids):
                budget = response_budget(
                    len(prompt), max_model_len=self.max_model_len, max_new_tokens=sampling.max_new_tokens
                )
                self.counters.skipped_prompts += budget == 0
                for sample in range(sampling.n):
                    seed = request_seed(sampling.seed, rl_step=rl_step, uid=prompts.uids[index], sample_index=sample)
                    ask = self._ask(prompt, sampling, seed=seed, budget=budget) if budget else None
                    rows.append((index, sample, ask))
            requests = iter(self._answer([ask for _, _, ask in rows if ask is not None]))
            sequences = [
                build_row(
                    prompts,
                    index,
                    sample_index=sample,
                    response=None if ask is None else next(requests).response(),
                    sampling=sampling,
                    policy_version=version,
                    directory=self.directory,
                    counters=self.counters,
                )
                for index, sample, ask in rows
            ]
        return Rollouts.from_sequences(sequences, temperature=sampling.temperature or 1.0)

    @contextmanager
    def session(self) -> Iterator[None]:
        """See `RolloutEngine.session`.

        Raises:
            RuntimeError: on all ranks that share the model, if one of them fails within it.
        """
        if self._group is None:
            yield
            return
        with self._group.session(version=self._version_in_use, sample=self._sample_for_others):
            yield

    def _sample_for_others(self, requests: Sequence[VLLMRequest], logits_temperature: float) -> None:
        with self._gate.requests(self.weight_version):
            self._sample(requests, logits_temperature)

    def _answer(self, asks: Sequence[Ask], *, logits_temperature: float = 1.0) -> list[VLLMRequest]:
        """What was asked for, with its answers, in order."""
        if self._group is None:
            requests = [ask.request(f"request-{next(self._serial)}") for ask in asks]
            self._sample(requests, logits_temperature)
            return requests
        return self._group.answer(
            asks, version=self._version_in_use(), logits_temperature=logits_temperature, sample=self._sample
        )

    def _ask(self, prompt: Sequence[int], sampling: SamplingConfig, *, seed: int, budget: int) -> Ask:
        arguments = sampling_arguments(
            sampling, seed=seed, budget=budget, end_token_ids=end_ids(self.directory, sampling)
        )
        return Ask(prompt=list(prompt), arguments=arguments)

    def _sample(self, requests: Sequence[VLLMRequest], logits_temperature: float = 1.0) -> None:
        """Steps vLLM until all requests are done or aborted; what an exception leaves behind is aborted as well."""
        waiting = {request.request_id: request for request in requests}
        try:
            with preserved_rng(), self._logits_divided_by(logits_temperature):
                for request in requests:
                    with refusals_named():
                        self._vllm.add_request(request.request_id, {"prompt_token_ids": request.prompt}, request.params)
                while waiting and self._gate.goes_on():
                    with self._gate.step():
                        outputs = self._vllm.step()
                        version = self._version_in_use()
                    for output in outputs:
                        if waiting[output.request_id].take(output, version=version):
                            del waiting[output.request_id]
        finally:
            if waiting:
                self._vllm.abort_request(list(waiting))

    def _version_in_use(self) -> int:
        if self.weight_version is None:
            raise RuntimeError("The weights became invalid while requests waited: a push failed. Abort them first.")
        return self.weight_version

    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of each id given those before it; see `RolloutEngine.score`.

        All keys and values are computed afresh: vLLM reads no prefix cache for requests with prompt log-probs.

        Raises:
            ValueError: if a sequence is empty, or longer than the engine takes, or the temperature is not above 0.
        """
        longest = length_with_room_to_score(self.directory, self.max_model_len) - 1
        check_scored(token_ids, longest=longest, temperature=temperature)
        arguments = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        asks = [Ask(prompt=list(ids), arguments=arguments) for ids in token_ids]
        with self._gate.requests(self.weight_version):
            requests = self._answer(asks, logits_temperature=temperature)
        return [request.prompt_log_probs() for request in requests]

    @contextmanager
    def _logits_divided_by(self, temperature: float) -> Iterator[None]:
        """Scales what the model computes, since vLLM reports prompt log-probs at temperature 1 only."""
        if temperature == 1:
            yield
            return
        model = self._on_worker(lambda worker: worker.model_runner.model)
        compute_logits = model.compute_logits
        model.compute_logits = lambda *args, **kwargs: compute_logits(*args, **kwargs).float() / temperature
        try:
            yield
        finally:
            del model.compute_logits

    def _on_worker(self, call: Callable[[Any], _T]) -> _T:
        if self._vllm is None:
            raise RuntimeError("The rollout engine was shut down.")
        result: _T = self._vllm.collective_rpc(call)[0]
        return result

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights in place; a push that fails leaves the engine without a version.

        Raises:
            ValueError: naming tensors that are unknown, of another shape, repeated or missing.
            RuntimeError: if the weights are asleep.
        """
        if "weights" in self._gate.asleep:
            raise RuntimeError("The engine's weights are asleep; wake_up(['weights']) before a push.")
        complete = False
        try:
            self._on_worker(
                lambda worker: load_in_place(
                    worker.model_runner.model, worker.model_runner.model_config, named_tensors, self._names
                )
            )
            complete = True
        finally:
            if not complete:
                self.weight_version = None

    def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of what vLLM holds under these names and layouts; on CPU norms, embedding and head (`read_own`)."""
        return self._on_worker(lambda worker: read_own(worker.model_runner.model, names, self._names))

    def read_rows(self, names: Sequence[str]) -> dict[str, TensorRows]:
        """This rank's rows of embedding and head, where ranks share the model."""
        if self._group is None:
            return {}
        return self._on_worker(lambda worker: read_own_rows(worker.model_runner.model, names, self._names))

    def reset_prefix_cache(self) -> None:
        """Forgets all keys and values; requests that wait in a pause compute theirs again.

        Raises:
            RuntimeError: if vLLM still holds blocks of the cache.
        """
        if not self._vllm.reset_prefix_cache(reset_running_requests=self._gate.in_flight):
            raise RuntimeError("vLLM did not reset its prefix cache: some blocks are in use.")

    def abort(self) -> None:
        """Ends the requests in flight between two tokens; from another thread than ``generate``'s.

        Raises:
            RuntimeError: if other ranks compute them, too: see `pause`.
        """
        self._refuse_to_stop_alone("abort")
        self._gate.abort()

    def pause(self) -> None:
        """Stops sampling between two tokens; returns when no token is being computed.

        Raises:
            RuntimeError: if other ranks compute the requests in flight, too: they would not stop at the same token.
        """
        self._refuse_to_stop_alone("pause")
        self._gate.pause()

    def _refuse_to_stop_alone(self, what: str) -> None:
        if self._group is not None and self._gate.in_flight:
            raise RuntimeError(
                f"{what}() while {self._group.size} ranks compute the same requests in step: they would stop at "
                f"different tokens. Wait for generate, or use VLLMRollout(mode='server', tensor_parallel_size="
                f"{self._group.size}), whose replicas stop as one."
            )

    def resume(self) -> None:
        """Goes on."""
        self._gate.resume()

    def sleep(self, level: int = 1) -> None:
        """Stops the engine until `wake_up`; level 2 also ends the validity of its weights.

        No memory is given back: vLLM has no sleep mode on CPU, and on CUDA this engine does not use it yet. The states
        are kept nevertheless, so that code written against them behaves the same everywhere.
        """
        self._gate.sleep(level)
        self.reset_prefix_cache()
        if level == 2:
            self.weight_version = None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Goes on after `sleep`; see there."""
        self._gate.wake_up(tags)

    def release_kv_cache(self) -> None:
        """Forgets the cache's content; its memory stays with vLLM (see `sleep`)."""
        self.reset_prefix_cache()

    def shutdown(self) -> None:
        """Ends vLLM and frees its memory; the default process group stays. A second call does nothing."""
        self.weight_version = None
        self._vllm = None
        self._finalizer()
        VLLMEngine._living = None
        gc.unfreeze()  # what lived when vLLM was imported, the Trainer's cycles among it, may go now
        gc.collect()


def _shut_down(vllm_engine: Any, built_in: dist.ProcessGroup | None) -> None:
    with guarded_groups(built_in):
        vllm_engine.engine_core.shutdown()
