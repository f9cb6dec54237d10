"""The device of an engine in this process: the one that the process computes on.

Left alone, vLLM's executor for one device takes the first that the process sees, on every rank, and the one for ranks
that share a model takes ``LOCAL_RANK``. ``CUDA_VISIBLE_DEVICES`` is of no use here: CUDA read it when it was
initialised, before vLLM is built.
"""

from __future__ import annotations

from typing import Any

import torch


def device_number(local_rank: int | None, *, current: int, count: int) -> int:
    """Which device vLLM is to use, as torch counts those that the process sees.

    Args:
        local_rank: the one that was asked for; None: the one that the process computes on.
        current: the one that the process computes on.
        count: devices that the process sees; 0 on a machine without.

    Raises:
        ValueError: if there is no such device, or the process computes on another one, which vLLM would change.
    """
    if count == 0:
        return 0
    number = current if local_rank is None else local_rank
    if not 0 <= number < count:
        raise ValueError(f"local_rank={number}: this process sees {count} device(s), numbered from 0.")
    if number != current:
        raise ValueError(
            f"vLLM is to use device {number}, but this process computes on device {current}, and vLLM would move it. "
            f"Call torch.cuda.set_device({number}) first (a Lightning strategy does), or leave local_rank out."
        )
    return number


def own_device(local_rank: int | None) -> int:
    """``device_number`` with what this process sees; vLLM must be imported."""
    from vllm.platforms import current_platform

    count = 0 if current_platform.is_cpu() else torch.accelerator.device_count()
    current = torch.accelerator.current_device_index() if count else 0
    return device_number(local_rank, current=current, count=count)


def executor_on_device(number: int) -> type[Any]:
    """vLLM's executor of one worker in this process, with the worker on the device of that number."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class Executor(UniProcExecutor):  # type: ignore[misc]
        """Takes another device than the first."""

        def _distributed_args(self) -> tuple[str, int, int]:
            init_method, rank, _ = super()._distributed_args()
            return init_method, rank, number

    return Executor
