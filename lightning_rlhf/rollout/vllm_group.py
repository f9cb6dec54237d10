"""One vLLM model cut over several ranks of the trainer, each of which runs an engine of its own around its share.

vLLM calls this the external launcher. The engines do not talk about what to compute: they stay in step because all of
them are given the same requests in the same order. So each rank's requests are first made known to all ranks of the
group; all compute all of them; each then takes the answers to its own. That they have sampled the same ids is checked.

Ranks ``r`` with the same ``r // tensor_parallel_size`` are a group; vLLM makes them of the default process group.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightning_rlhf.batching.exchange import all_gather_bytes
from lightning_rlhf.contracts.rollout import TensorRows
from lightning_rlhf.rollout.model_directory import WeightNames
from lightning_rlhf.rollout.vllm_build import add_cpu_arguments
from lightning_rlhf.rollout.vllm_device import own_device
from lightning_rlhf.rollout.vllm_process import forget_parallel_state
from lightning_rlhf.rollout.vllm_request import VLLMRequest, build_sampling_params, refusals_named

_CPU = torch.device("cpu")

State = Literal["asks", "done", "failed"]

GRACE_SECONDS = 2.0
"""After an error in the sampling, until the others are taken to wait for this rank in a collective of the model."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request before vLLM knows it; JSON throughout.

    Attributes:
        prompt: ids.
        arguments: of ``SamplingParams``, by name.
    """

    prompt: list[int]
    arguments: dict[str, Any]

    def request(self, request_id: str) -> VLLMRequest:
        """For this process's vLLM.

        Raises:
            ValueError: for what vLLM refuses.
        """
        with refusals_named():
            return VLLMRequest(request_id=request_id, prompt=self.prompt, params=build_sampling_params(self.arguments))


class RankGroup:
    """The ranks that share one vLLM model, and what they tell each other before and after each round of sampling.

    Args:
        group: the ranks, with a transport on the host.
        cut: ends the collectives of the model itself in which other ranks wait for this one.
    """

    def __init__(self, group: dist.ProcessGroup, *, cut: Callable[[], None] = lambda: None) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._cut = cut
        self._round_number = 0
        self._others_know = False

    def answer(
        self,
        asks: Sequence[Ask],
        *,
        version: int,
        logits_temperature: float,
        sample: Callable[[Sequence[VLLMRequest], float], None],
    ) -> list[VLLMRequest]:
        """Has all ranks compute all ranks' requests. Collective.

        Args:
            asks: of this rank.
            version: of the weights that it samples with.
            logits_temperature: divides what the model computes; the same on all ranks that ask for something.
            sample: computes requests, with logits divided so.

        Returns:
            This rank's requests with their answers, in order.

        Raises:
            RuntimeError: on all ranks, if they hold other versions, ask at other temperatures, do not sample the same,
                or one of them gave up, or failed while it sampled: soon, and with that rank's error.
        """
        return self._round("asks", asks, version, logits_temperature, sample)[0]

    @contextmanager
    def session(
        self, *, version: Callable[[], int], sample: Callable[[Sequence[VLLMRequest], float], None]
    ) -> Iterator[None]:
        """Within it ranks may call `answer` different numbers of times; at its end each serves those that go on.

        An error of one rank ends the others' sessions, too. Collective.

        Args:
            version: of the weights, when asked.
            sample: see `answer`.
        """
        self._others_know = False
        try:
            yield
        except (Exception, KeyboardInterrupt):
            if not self._others_know:  # else the others know of it
                self._tell("failed", (), version=-1, logits_temperature=1.0)
            raise
        while not self._round("done", (), version(), 1.0, sample)[1]:
            pass

    def _round(
        self,
        state: State,
        asks: Sequence[Ask],
        version: int,
        logits_temperature: float,
        sample: Callable[[Sequence[VLLMRequest], float], None],
    ) -> tuple[list[VLLMRequest], bool]:
        """One exchange, and the sampling that it leads to; also whether no rank has anything more to ask."""
        try:
            told = self._tell(state, asks, version=version, logits_temperature=logits_temperature)
            if all(one["state"] == "done" for one in told):
                return [], True
            temperature = _agreed(told)
            name = f"round-{self._round_number}"
            requests = [
                [ask.request(f"{name}-{rank}-{place}") for place, ask in enumerate(_unpacked(one["asks"]))]
                for rank, one in enumerate(told)
            ]
            everyones = [request for of_rank in requests for request in of_rank]
            failure: BaseException | None = None
            failed_at: float | None = None
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)
                    sample(everyones, temperature)
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (raised by _check_same: others must know)
                failure, failed_at = error, time.monotonic()  # the ranks are of one machine, and so is their clock
            self._gather_after(failure)
            self._check_same(everyones, failure, failed_at)
            return requests[self.rank], False
        except (Exception, KeyboardInterrupt):
            self._others_know = True
            raise

    def _gather_after(self, failure: BaseException | None) -> None:
        """Waits for the others after the sampling; those who wait for a rank that failed in the model are called."""
        work = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
        assert work is not None
        if failure is not None:
            end = time.monotonic() + GRACE_SECONDS  # where all refuse the same there is nothing to cut
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(0.01)
            if not work.is_completed():
                self._cut()
        work.wait()

    def _tell(
        self, state: State, asks: Sequence[Ask], *, version: int, logits_temperature: float
    ) -> list[dict[str, Any]]:
        self._round_number += 1
        return self._exchange(
            {"state": state, "version": version, "logits_temperature": logits_temperature, "asks": _packed(asks)}
        )

    def _exchange(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(part) for part in all_gather_bytes(json.dumps(own).encode(), group=self._group, device=_CPU)]

    def _check_same(
        self, requests: Sequence[VLLMRequest], failure: BaseException | None, failed_at: float | None
    ) -> None:
        """After the sampling: raises if a rank failed, the first error on all of them, or they are out of step."""
        digest = hashlib.blake2b(digest_size=8)
        for request in requests:
            digest.update(f"{request.request_id} {request.finish_reason} {len(request.token_ids)} ".encode())
            digest.update(np.asarray(request.token_ids, dtype=np.int64).tobytes())
        own = {"digest": digest.hexdigest(), "failed_at": failed_at, "error": f"{type(failure).__name__}: {failure}"}
        told = self._exchange(own)
        failures = [(one["failed_at"], rank) for rank, one in enumerate(told) if one["failed_at"] is not None]
        if failures:
            first = min(failures)[1]
            if failure is not None and first == self.rank:
                raise failure
            raise RuntimeError(
                f"Rank {first} of the {self.size} that share one vLLM model has failed while it sampled, which ends "
                f"the rollout on all of them: {told[first]['error']}"
            ) from failure
        if len({one["digest"] for one in told}) > 1:
            raise RuntimeError(
                f"The {self.size} ranks that share one vLLM model have sampled different ids for the same requests: "
                f"their engines are out of step, and none of the responses can be used. Sample with "
                f"tensor_parallel_size=1 or VLLMRollout(mode='server')."
            )


def _agreed(told: Sequence[Mapping[str, Any]]) -> float:
    """The temperature of the logits, if all ranks are of one mind."""
    if failed := [rank for rank, one in enumerate(told) if one["state"] == "failed"]:
        raise RuntimeError(
            f"Rank {failed[0]} of the {len(told)} that share one vLLM model has failed in this rollout; its own "
            f"message says how."
        )
    versions = [one["version"] for one in told]
    if len(set(versions)) > 1:
        raise RuntimeError(f"The ranks that share one vLLM model hold weights of versions {versions}: push first.")
    temperatures = {one["logits_temperature"] for one in told if one["state"] == "asks"}
    if len(temperatures) > 1:
        raise RuntimeError(
            f"The ranks that share one vLLM model ask for logits at temperatures {sorted(temperatures)} in one round; "
            f"score with one temperature, and on all ranks at the same time."
        )
    return float(temperatures.pop())


def _packed(asks: Sequence[Ask]) -> list[Any]:
    """Each prompt once, with the arguments of all its samples."""
    return [[prompt, [ask.arguments for ask in same]] for prompt, same in itertools.groupby(asks, lambda a: a.prompt)]


def _unpacked(packed: Sequence[Any]) -> list[Ask]:
    return [Ask(prompt=prompt, arguments=one) for prompt, arguments in packed for one in arguments]


def check_group_size(tensor_parallel_size: int, *, engine_kwargs: Mapping[str, Any]) -> None:
    """Refuses sizes that the default process group does not have.

    Raises:
        RuntimeError: without a process group.
        ValueError: if the size does not divide its ranks, or an argument is given twice.
    """
    own = ("tensor_parallel_size", "distributed_executor_backend")
    if twice := sorted(set(own) & set(engine_kwargs)):
        raise ValueError(f"engine_kwargs may not hold {twice}: tensor_parallel_size={tensor_parallel_size} decides it.")
    if not dist.is_initialized():
        raise RuntimeError(
            f"tensor_parallel_size={tensor_parallel_size} cuts vLLM's model over the ranks of the trainer, but this "
            f"process has no process group. Build the engine after the strategy has set it up."
        )
    world_size = dist.get_world_size()
    if world_size % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} does not divide the {world_size} ranks that would share "
            f"vLLM's model in groups of that size."
        )


def build_group_engine(arguments: dict[str, Any], *, tensor_parallel_size: int, local_rank: int | None) -> Any:
    """vLLM's ``LLMEngine`` around this rank's share of the model. Collective over the default process group.

    Args:
        arguments: those of an engine on one device.
        tensor_parallel_size: ranks that share the model.
        local_rank: number of this rank's device; None: the one that this process computes on.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class Executor(ExecutorWithExternalLauncher):  # type: ignore[misc]
        """Takes its place from the process group, which a strategy may have set up without ``torchrun``'s variables."""

        def _distributed_args(self) -> tuple[str, int, int]:
            # On CPU vLLM sums over shared memory if the ranks name it alike: it spins without end for a rank that is
            # gone, and leaves the segments behind. Unlike names have it use the process group, which has a timeout.
            return f"env://{dist.get_rank()}", dist.get_rank(), device

    device = own_device(local_rank)
    _leave_lookup_uncompiled()
    add_cpu_arguments(arguments)
    arguments |= {"tensor_parallel_size": tensor_parallel_size, "distributed_executor_backend": "external_launcher"}
    try:
        with _no_message_queue():
            config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
            return LLMEngine(vllm_config=config, executor_class=Executor, log_stats=not arguments["disable_log_stats"])
    except BaseException as error:
        error.add_note(f"vLLM was built with {arguments}; kv_cache_bytes sets the memory of its cache.")
        forget_parallel_state()  # else the next engine of this process meets groups of this one
        raise


def _leave_lookup_uncompiled() -> None:
    """Has a CPU look tokens up in its share of the embedding as written.

    vLLM compiles the few elementwise operations of it even with ``enforce_eager``; on a CPU that takes a C++ compiler
    half a minute at the first token. Switching dynamo off in the whole process would take it from the trainer, too.
    """
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        masked = vocab_parallel_embedding.get_masked_input_and_mask
        vocab_parallel_embedding.get_masked_input_and_mask = vars(masked).get("_torchdynamo_orig_callable", masked)


@contextmanager
def _no_message_queue() -> Iterator[None]:
    """Keeps vLLM from opening sockets between the ranks, which serve an executor that leads workers.

    Nothing is sent over them here, and their end may wait for ever in Python's garbage collection.
    """
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    def create_none(*_: Any, **__: Any) -> None:
        return None

    create = MessageQueue.__dict__["create_from_process_group"]
    MessageQueue.create_from_process_group = staticmethod(create_none)
    try:
        yield
    finally:
        MessageQueue.create_from_process_group = create


def group_of_engine() -> RankGroup:
    """The ranks that this process's vLLM shares its model with."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return RankGroup(group.cpu_group, cut=lambda: _close(group.device_group))


def _close(group: dist.ProcessGroup) -> None:
    """Closes this rank's connections of a group for good: collectives in which others wait for it raise at once.

    Gloo closes all of them when a wait runs out of time, so one is begun that does, for what nobody sends. NCCL cannot
    be told so by one rank: there the others find out when their own collective has run out of time.
    """
    if dist.get_backend(group) == "gloo":
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        work = dist.irecv(torch.empty(1), others[0], group=group, tag=1)
        with suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))  # type: ignore[union-attr] # this rank is in the group


def read_own_rows(model: nn.Module, wanted: Sequence[str], names: WeightNames) -> dict[str, TensorRows]:
    """Copies of this rank's rows of embedding and head, which vLLM cuts by vocabulary.

    Args:
        model: the model of vLLM's worker, in this process.
        wanted: Hugging Face names.
        names: the model's names, for shapes and ties.

    Returns:
        By name, for those of ``wanted`` that are cut so; the vocabulary's padding is left out.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    found: dict[str, TensorRows] = {}
    for layer_name, layer in model.named_modules(remove_duplicate=False):
        name = f"{layer_name}.weight"
        shape = names.shapes.get(names.aliases.get(name, name))
        if name in wanted and shape is not None and isinstance(layer, VocabParallelEmbedding):
            cut = layer.shard_indices
            first, end = cut.org_vocab_start_index, min(cut.org_vocab_end_index, shape[0])
            if 0 < end - first < shape[0]:
                rows = layer.weight.detach()[: end - first].clone()
                found[name] = TensorRows(rows=rows, first=first, num_rows=shape[0])
    return found
