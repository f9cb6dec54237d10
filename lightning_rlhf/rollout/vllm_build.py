"""The arguments that every vLLM engine of a run is built with; building one whose core is in this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from lightning_rlhf.rollout.model_directory import ModelDirectory
from lightning_rlhf.rollout.vllm_device import executor_on_device, own_device
from lightning_rlhf.rollout.vllm_process import forget_parallel_state

DTYPES = ("float32", "bfloat16")


def length_with_room_to_score(directory: ModelDirectory, max_model_len: int) -> int:
    """The limit to build vLLM with: it scores prompts only, and a prompt must leave room for one id more.

    Raises:
        ValueError: if the model has fewer positions.
    """
    longest = int(directory.config.get_text_config().max_position_embeddings)
    if max_model_len > longest:
        raise ValueError(f"max_model_len={max_model_len} exceeds the model's {longest} positions.")
    return min(max_model_len + 1, longest)


def engine_arguments(
    directory: ModelDirectory,
    *,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_bytes: int,
    enable_prefix_caching: bool,
    load_format: str,
    logprobs_mode: str,
    seed: int,
    engine_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """vLLM's ``EngineArgs`` by name; what each means is told at `VLLMEngine`.

    Raises:
        ValueError: for a dtype that is not served here, or an argument that is given twice.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: vLLM's weights are 'float32' or 'bfloat16' here.")
    arguments: dict[str, Any] = {
        "model": directory.path,
        "dtype": dtype,
        "max_model_len": length_with_room_to_score(directory, max_model_len),
        "max_num_seqs": max_num_seqs,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "enable_prefix_caching": enable_prefix_caching,
        "load_format": load_format,
        "logprobs_mode": logprobs_mode,
        "seed": seed % 2**32,  # vLLM takes no others, and it decides no sample: requests have seeds of their own
        "async_scheduling": False,  # else a token computed before a push comes out after it, with its version
    }
    defaults = {
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
        "generation_config": "vllm",  # no sampling default from the checkpoint: SamplingConfig is the only source
    }
    given = dict(engine_kwargs or {})
    if twice := sorted(arguments.keys() & given.keys()):
        raise ValueError(f"engine_kwargs repeats {twice}: these are arguments of the engine itself.")
    return {**defaults, **arguments, **given}


def add_cpu_arguments(arguments: dict[str, Any]) -> None:
    """Fills in what vLLM's CPU kernels need; vLLM must be imported."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    _let_vllm_look_at_llvmlite()
    # A prompt that is read in two steps has vLLM rewind its request's generator, which CPU generators cannot.
    arguments.setdefault("enable_chunked_prefill", False)
    arguments.setdefault("max_num_batched_tokens", max(2048, arguments["max_model_len"]))
    # The smallest that its attention takes: a group shares whole blocks of its prompt, and vLLM's 128 are too many.
    arguments.setdefault("block_size", 32)


def _let_vllm_look_at_llvmlite() -> None:
    """Keeps vLLM from stumbling over llvmlite, which numba loads, and ours for copies past the cache.

    A worker on a CPU reads ``vars()`` of all that any loaded module holds (0.32, ``triton_utils/dispatcher.py``), and
    llvmlite's handle of its library answers every name, ``__dict__`` too, with a function of that name.
    """
    ffi: Any = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None or not callable(getattr(ffi.lib, "__dict__", None)):
        return
    handle = ffi._lib_wrapper
    answer = handle.__getattr__

    def answer_names_of_functions(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    handle.__getattr__ = answer_names_of_functions


def build_llm_engine(arguments: dict[str, Any], *, local_rank: int | None = None) -> Any:
    """vLLM's ``LLMEngine`` with scheduler and, for one device, worker in this process.

    Args:
        arguments: those of `engine_arguments`.
        local_rank: number of the one device; None: the one that this process computes on.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.abstract import Executor

    add_cpu_arguments(arguments)
    try:
        config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
        here = config.parallel_config.distributed_executor_backend == "uni"
        executor = executor_on_device(own_device(local_rank)) if here else Executor.get_class(config)
        return LLMEngine(vllm_config=config, executor_class=executor, log_stats=not arguments["disable_log_stats"])
    except BaseException as error:
        error.add_note(f"vLLM was built with {arguments}; kv_cache_bytes sets the memory of its cache.")
        forget_parallel_state()  # else the next engine of this process meets groups of this one
        raise
