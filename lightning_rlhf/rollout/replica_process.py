"""The life of one replica's process: build vLLM, serve, end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web

from lightning_rlhf.rollout.model_directory import ModelDirectory
from lightning_rlhf.rollout.replica_engine import ReplicaEngine
from lightning_rlhf.rollout.replica_server import ReplicaServer
from lightning_rlhf.rollout.vllm_build import build_llm_engine, engine_arguments
from lightning_rlhf.rollout.vllm_process import IN_PROCESS, import_vllm
from lightning_rlhf.rollout.vllm_transfer import BACKEND, WORKER_EXTENSION, register


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """How a replica is built. All values are JSON's.

    Attributes:
        model: directory (or cached name) with config and tokenizer.
        max_model_len: limit on prompt and response together.
        kv_cache_bytes: memory of the key-value cache, on each device.
        dtype: ``float32`` or ``bfloat16``, of weights, compute and cache.
        max_num_seqs: requests that are sampled side by side.
        enable_prefix_caching: whether requests share keys and values of what they begin with alike.
        load_format: ``dummy`` reads no checkpoint, since weights are pushed before anything is sampled.
        logprobs_mode: ``processed_logprobs`` are those that a token is drawn from.
        seed: of the engine; requests carry their own.
        tensor_parallel_size: workers that share the model; more than one are processes of their own.
        devices: CUDA devices that it may use; None: those that the process sees.
        num_threads: threads of one worker on a CPU; None leaves it to torch.
        engine_kwargs: more of vLLM's ``EngineArgs``.
    """

    model: str
    max_model_len: int
    kv_cache_bytes: int
    dtype: str = "float32"
    max_num_seqs: int = 64
    enable_prefix_caching: bool = True
    load_format: str = "dummy"
    logprobs_mode: str = "processed_logprobs"
    seed: int = 0
    tensor_parallel_size: int = 1
    devices: list[int] | None = None
    num_threads: int | None = None
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def arguments(self) -> dict[str, Any]:
        """vLLM's ``EngineArgs`` by name.

        Raises:
            ValueError: for what vLLM cannot be built with.
        """
        executor = "uni" if self.tensor_parallel_size == 1 else "mp"
        own = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "weight_transfer_config": {"backend": BACKEND},
            "worker_extension_cls": WORKER_EXTENSION,
        }
        if taken := sorted(own.keys() & self.engine_kwargs.keys()):
            raise ValueError(f"engine_kwargs may not hold {taken}: the replica sets them.")
        return {
            "distributed_executor_backend": executor,
            **engine_arguments(
                ModelDirectory.read(self.model),
                dtype=self.dtype,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                kv_cache_bytes=self.kv_cache_bytes,
                enable_prefix_caching=self.enable_prefix_caching,
                load_format=self.load_format,
                logprobs_mode=self.logprobs_mode,
                seed=self.seed,
                engine_kwargs={"distributed_executor_backend": executor, **own, **self.engine_kwargs},
            ),
        }


def prepare_process() -> None:
    """Imports vLLM with what makes it start fast; the process is a replica's, or one that replicas are forked from."""
    os.environ.update(IN_PROCESS)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_bytes
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # replicas side by side would all bind to the first cores
    import_vllm()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _fork_workers(type(current_platform))
    register()


def _fork_workers(platform: Any) -> None:
    """Has tensor parallel workers forked, since a spawned one takes seconds to import vLLM; vLLM asks for spawn."""
    check = platform.check_and_update_config.__func__

    def check_then_fork(cls: Any, config: Any) -> None:
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check_then_fork)


def serve(config: ReplicaConfig, listener: socket.socket, *, token: str) -> None:
    """Serves until the engine dies, which ends the process with status 1, or until SIGTERM, after which vLLM is ended.

    The port answers only once vLLM is built.
    """
    if config.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in config.devices)
    if config.num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
        import torch

        torch.set_num_threads(config.num_threads)
    died = threading.Event()

    def on_death(error: BaseException) -> None:
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
        died.set()
        os._exit(1)  # a replica that cannot sample must not look alive

    engine = ReplicaEngine(lambda: build_llm_engine(config.arguments()), on_death=on_death)
    engine.ready.result()
    asyncio.run(_serve(ReplicaServer(engine, token=token), listener))
    engine.stop()


async def _serve(server: ReplicaServer, listener: socket.socket) -> None:
    runner = web.AppRunner(server.application(), access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
