"""vLLM inside a replica's process, in a thread of its own that takes commands between two tokens.

All that touches vLLM happens in that thread, one thing after the other, so a token is sampled either wholly before or
wholly after a change of weights, and its version is the one that this thread holds while the token is computed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from lightning_rlhf.rollout.vllm_request import VLLMRequest, build_sampling_params, refusals_named

T = TypeVar("T")
Done = Callable[[VLLMRequest], None]


class NoWeightsError(RuntimeError):
    """The replica has no valid weights, so it does not generate."""


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """What a replica says about itself.

    Attributes:
        weight_version: of its weights; None: none are valid.
        in_flight: requests that it holds.
        paused: whether it waits between two tokens.
        busy_for: seconds since the engine's thread took up the command or token that it is at; 0 when it waits.
        generated: tokens sampled so far.
        workers: that share the model.
        max_model_len: limit on prompt and response together.
        dtype: of weights and compute, ``float32`` or ``bfloat16``.
    """

    weight_version: int | None
    in_flight: int
    paused: bool
    busy_for: float
    generated: int
    workers: int
    max_model_len: int
    dtype: str


class ReplicaEngine:
    """Starts the thread; every public method may be called from any thread and returns at once.

    Args:
        build: gives vLLM's ``LLMEngine``; called in the thread.
        on_death: called with the error that ends the thread, after which nothing works any more.
    """

    def __init__(self, build: Callable[[], Any], *, on_death: Callable[[BaseException], None]) -> None:
        self._build = build
        self._on_death = on_death
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._requests: dict[str, tuple[VLLMRequest, Done]] = {}
        self._paused = False
        self._weight_version: int | None = None
        self._busy_since: float | None = None
        self._generated = 0
        self._workers = 1
        self._max_model_len = 0
        self._dtype = ""
        self._vllm: Any = None
        self.ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="replica-engine", daemon=True)
        self._thread.start()

    # --- from any thread --------------------------------------------------------------------------------------------

    def status(self) -> ReplicaStatus:
        """A look from outside; needs no answer of the thread, which may hang."""
        since = self._busy_since
        return ReplicaStatus(
            weight_version=self._weight_version,
            in_flight=len(self._requests),
            paused=self._paused,
            busy_for=0.0 if since is None else time.monotonic() - since,
            generated=self._generated,
            workers=self._workers,
            max_model_len=self._max_model_len,
            dtype=self._dtype,
        )

    def add(self, requests: Sequence[Mapping[str, Any]], on_done: Done) -> Future[None]:
        """Takes requests in: each with ``request_id``, ``prompt_token_ids`` and ``params``, vLLM's by name.

        Args:
            requests: see above.
            on_done: called in the engine's thread once for each of them, when it has ended or was aborted.
        """
        return self._call(lambda: self._add(requests, on_done))

    def abort(self, request_ids: Sequence[str] | None) -> Future[int]:
        """Ends requests, all for None; what they have is kept. The result is how many there were."""
        return self._call(lambda: self._abort(list(self._requests) if request_ids is None else request_ids))

    def pause(self, mode: Literal["keep", "abort"]) -> Future[None]:
        """Stops between two tokens; requests wait, or end with what they have."""
        return self._call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Goes on."""
        return self._call(lambda: setattr(self, "_paused", False))

    def update_weights(self, info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Future[None]:
        """Loads a push. There is no valid version from now on until `set_version`, also after a failure."""
        return self._call(lambda: self._update_weights(info))

    def set_version(self, version: int | None) -> Future[None]:
        """Says which version the weights are; None: not to be used."""
        return self._call(lambda: self._set_version(version))

    def read_weights(self, names: Sequence[str]) -> Future[dict[str, Tensor]]:
        """Copies of the tensors that some worker holds whole under these names."""
        return self._call(lambda: self._read_weights(names))

    def reset_prefix_cache(self) -> Future[None]:
        """Forgets keys and values; requests in flight compute theirs again."""
        return self._call(self._reset_prefix_cache)

    def stop(self) -> None:
        """Ends vLLM and the thread; waits for both."""
        self._commands.put(None)
        self._thread.join(timeout=30)

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._commands.put((function, future))
        return future

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._vllm = self._build()
            self._workers = int(self._vllm.vllm_config.parallel_config.world_size)
            self._max_model_len = int(self._vllm.vllm_config.model_config.max_model_len)
            self._dtype = str(self._vllm.vllm_config.model_config.dtype).removeprefix("torch.")
            self.ready.set_result(None)
            while self._obey():
                if self._may_step():
                    self._step()
            self._vllm.engine_core.shutdown()
        except BaseException as error:  # noqa: BLE001 (handed on: the process ends with it)
            if not self.ready.done():
                self.ready.set_exception(error)
            self._on_death(error)

    def _may_step(self) -> bool:
        return bool(self._requests) and not self._paused and self._weight_version is not None

    def _obey(self) -> bool:
        """Carries out the commands that wait; waits for one when there is nothing to sample. False: the end."""
        while True:
            self._busy_since = None
            try:
                command = self._commands.get(block=not self._may_step())
            except queue.Empty:
                return True
            if command is None:
                return False
            function, future = command
            self._busy_since = time.monotonic()
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 (it belongs to who gave the command)
                future.set_exception(error)

    def _step(self) -> None:
        self._busy_since = time.monotonic()
        outputs = self._vllm.step()
        version = self._weight_version
        assert version is not None  # _may_step
        for output in outputs:
            entry = self._requests.get(output.request_id)
            if entry is None:  # aborted
                continue
            request, on_done = entry
            before = len(request.token_ids)
            done = request.take(output, version=version)
            self._generated += len(request.token_ids) - before
            if done:
                del self._requests[output.request_id]
                on_done(request)

    def _add(self, requests: Sequence[Mapping[str, Any]], on_done: Done) -> None:
        if self._weight_version is None:
            raise NoWeightsError("This replica has no valid weights: none were pushed, or a push failed half-way.")
        taken: list[str] = []
        try:
            for given in requests:
                params = build_sampling_params(given["params"])
                prompt = [int(token) for token in given["prompt_token_ids"]]
                request = VLLMRequest(request_id=str(given["request_id"]), prompt=prompt, params=params)
                if request.request_id in self._requests:
                    raise ValueError(f"Request {request.request_id!r} is here already; every request has its own id.")
                with refusals_named():
                    self._vllm.add_request(request.request_id, {"prompt_token_ids": prompt}, params)
                self._requests[request.request_id] = (request, on_done)
                taken.append(request.request_id)
        except BaseException:
            for request_id in taken:
                del self._requests[request_id]
            self._vllm.abort_request(taken)
            raise

    def _abort(self, request_ids: Sequence[str]) -> int:
        here = [request_id for request_id in request_ids if request_id in self._requests]
        self._vllm.abort_request(here)
        for request_id in here:
            request, on_done = self._requests.pop(request_id)
            on_done(request)
        return len(here)

    def _pause(self, mode: str) -> None:
        if mode not in ("keep", "abort"):
            raise ValueError(f"pause mode {mode!r}: expected 'keep' or 'abort'.")
        self._paused = True
        if mode == "abort":
            self._abort(list(self._requests))

    def _update_weights(self, info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self._weight_version = None
        try:
            self._vllm.collective_rpc("start_weight_update")
            self._vllm.collective_rpc("update_weights", kwargs={"update_info": info})
            self._vllm.collective_rpc("finish_weight_update")
        except BaseException:
            self._abort(list(self._requests))  # their tokens so far are right; others can go on with them
            raise
        self._reset_prefix_cache()

    def _set_version(self, version: int | None) -> None:
        if version is not None and not isinstance(version, int):
            raise ValueError(f"version {version!r}: expected an integer or null.")
        self._weight_version = version
        if version is not None:
            self._vllm.set_weight_version(str(version))

    def _read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in self._vllm.collective_rpc("read_weights_for_receipt", args=(list(names),)):
            found.update(part)
        return found

    def _reset_prefix_cache(self) -> None:
        if not self._vllm.reset_prefix_cache(reset_running_requests=bool(self._requests)):
            raise RuntimeError("vLLM did not reset its prefix cache: some blocks are in use.")
