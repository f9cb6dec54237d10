"""What the real megatron-core 0.16 needs to run on a machine without CUDA, in one place, installed only in a scope.

Each piece names the upstream line (megatron-core 0.16.1) that it answers. Nothing here changes a number: factories and
copies land on the CPU, streams and events do nothing, and two collectives that gloo lacks are built from one that it
has. Where CUDA is available all of this refuses to be installed.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

Replacement = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and what the attribute is inside the scope."""

_ABSENT = object()
_RANDOM = "megatron.core.tensor_parallel.random"
_depth = 0
_undo: list[Replacement] = []


@contextmanager
def cpu_compat() -> Iterator[None]:
    """Make megatron-core run on this CPU until the block is left. Scopes may be nested.

    Raises:
        RuntimeError: where CUDA is available, since megatron-core runs there as it is.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "The CPU compatibility layer replaces parts of torch.cuda and was asked for on a machine with CUDA. Use "
            "CudaBackend there: choose_backend('cuda')."
        )
    with ExitStack() as stack:
        stack.callback(_leave)
        _enter()
        # torch.compile (megatron's jit_fuser: router.py:531, fused_bias_dropout.py:67) costs seconds and gains nothing
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_OnCpu())
        yield


def _enter() -> None:
    global _depth
    _depth += 1
    if _depth > 1:
        return
    logging.getLogger(_RANDOM).addFilter(_is_news)
    for owner, name, value in _replacements():
        _undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)


def _leave() -> None:
    global _depth
    _depth -= 1
    if _depth:
        return
    logging.getLogger(_RANDOM).removeFilter(_is_news)
    while _undo:
        owner, name, value = _undo.pop()
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


class _OnCpu(TorchFunctionMode):
    """Literal CUDA devices, pinned memory, ``.cuda()`` and ``.type()`` inside megatron's own code.

    Answers schedules.py:596, optimizer.py:481, clip_grads.py:103 (factories with ``device="cuda"``), rope_utils.py:63
    (``pin_memory``), language_module.py:244, rope_utils.py:64, distrib_optimizer.py:1089 (``.cuda()``),
    clip_grads.py:167, optimizer.py:671, distrib_optimizer.py:361 (the name of a tensor's type).
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Inert:
    """A CUDA stream or event of which every method does nothing and returns the object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


def _replacements() -> list[Replacement]:
    return [*_device_pieces(), *_random_pieces(), *_moe_pieces(), *_collective_pieces(), *_checkpoint_pieces()]


def _device_pieces() -> list[Replacement]:
    one = _Inert()

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def stream(*_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    return [
        # distributed/param_and_grad_buffer.py:800, p2p_communication.py:313, mappings.py:91
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        # p2p_communication.py:242, dist_checkpointing/strategies/filesystem_async.py:230
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "empty_cache", nothing),
        # moe/token_dispatcher.py:445, distributed/param_and_grad_buffer.py (overlapped reductions)
        (torch.cuda, "Stream", _Inert),
        (torch.cuda, "Event", _Inert),
        (torch.cuda, "current_stream", lambda *_, **__: one),
        (torch.cuda, "default_stream", lambda *_, **__: one),
        (torch.cuda, "stream", stream),
    ]


def _random_pieces() -> list[Replacement]:
    """The tracker of CUDA random states works on the CPU's generator: tensor_parallel/random.py:235."""
    import megatron.core.tensor_parallel.random as megatron_random

    def get_state(*_: Any, **__: Any) -> Tensor:
        return torch.get_rng_state()

    def set_state(state: Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    return [
        (megatron_random, "_get_cuda_rng_state", get_state),
        (megatron_random, "_set_cuda_rng_state", set_state),
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda, "manual_seed", manual_seed),
    ]


def _is_news(record: logging.LogRecord) -> bool:
    """random.py:265 warns whenever the CPU's random state moves inside a fork, which is what is wanted here."""
    return "CPU RNG state changed" not in record.getMessage()


def _moe_pieces() -> list[Replacement]:
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return [
        # moe/moe_utils.py:1192 reads this name, which is bound only where Transformer Engine is installed
        (moe_utils, "te_general_gemm", None),
        # moe/moe_utils.py:1093 leaves split sizes as a tensor unless they were on a GPU
        (token_dispatcher, "maybe_move_tensor_to_cpu", to_cpu),
    ]


def _collective_pieces() -> list[Replacement]:
    """Gather and reduce-scatter of uneven pieces, which gloo has not: tensor_parallel/mappings.py:150 and :197."""
    import megatron.core.tensor_parallel.mappings as mappings

    even_gather: Callable[..., Tensor] = mappings._gather_along_first_dim
    even_reduce_scatter: Callable[..., Tensor] = mappings._reduce_scatter_along_first_dim

    def gather(tensor: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(tensor, group, output_split_sizes, use_global_buffer)
        out = tensor.new_empty([sum(output_split_sizes), *tensor.shape[1:]])
        copies = torch.cat([tensor] * group.size())
        dist.all_to_all_single(out, copies, list(output_split_sizes), [len(tensor)] * group.size(), group=group)
        return out

    def reduce_scatter(
        tensor: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(tensor, group, input_split_sizes, use_global_buffer)
        mine = input_split_sizes[group.rank()]
        out = tensor.new_empty([mine * group.size(), *tensor.shape[1:]])
        dist.all_to_all_single(out, tensor.contiguous(), [mine] * group.size(), list(input_split_sizes), group=group)
        return out.view(group.size(), mine, *tensor.shape[1:]).sum(0)

    return [
        (mappings, "_gather_along_first_dim", gather),
        (mappings, "_reduce_scatter_along_first_dim", reduce_scatter),
    ]


def _checkpoint_pieces() -> list[Replacement]:
    """Reloading the distributed optimizer over torch's AdamW, which stands in for the fused Adam of TE and apex."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
    import megatron.core.optimizer.distrib_optimizer as module

    optimizer: Any = module.DistributedOptimizer
    state_dict: Callable[..., Any] = optimizer.state_dict
    load_state_dict: Callable[..., Any] = optimizer.load_state_dict

    @torch.no_grad()
    def set_states(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        """distrib_optimizer.py:940 also copies ``step``, which is absent, and writes a leaf that needs gradients."""
        group, order = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][order]
        parameter.copy_(tensors["param"])
        for name in ("exp_avg", "exp_avg_sq"):
            self.optimizer.state[parameter][name].copy_(tensors[name])

    def filled_state_dict(self: Any) -> Any:
        """distrib_optimizer.py:642 asserts that all states have one ``step``; a fresh optimizer has no state."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.tensor(0.0), **zeros)
        return state_dict(self)

    def own_steps(self: Any, loaded: Any) -> None:
        """distrib_optimizer.py:817 shares one ``step`` tensor, which AdamW would then count up once a parameter."""
        load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def results_queue() -> Any:
        """filesystem_async.py:52 spawns a manager, which imports the main module again: seconds for each save."""
        if writer._results_queue is None:
            writer._results_queue = multiprocessing.get_context("fork").Manager().Queue()
        return writer._results_queue

    pieces: list[Replacement] = [(writer, "_get_write_results_queue", results_queue)]
    if not module.HAVE_APEX_OR_TE:
        pieces += [
            (optimizer, "_set_main_param_and_optimizer_states", set_states),
            (optimizer, "state_dict", filled_state_dict),
            (optimizer, "load_state_dict", own_steps),
        ]
    return pieces
