"""What one process of a parity run does: three optimizer steps, with every number on the way written down."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, OptimizerStepResult
from lightning_rlhf.engines.hf_engine import HFEngine
from lightning_rlhf.engines.megatron.engine import MegatronEngine
from lightning_rlhf.engines.megatron.load import disk_names as as_on_disk
from lightning_rlhf.parity.batch import loss_function, rows_of_rank, with_other_policies
from lightning_rlhf.types import Experience

NUM_STEPS = 3
LEARNING_RATE = 1e-3
EPS = 1e-4
"""Of AdamW. The default of 1e-8 makes the first step the sign of the gradient, whose noise near 0 is then 1e-3."""
DEFAULT_EPS = 1e-8
MAX_GRAD_NORM = 0.5
"""Below the batch's gradient norm, so that clipping is compared as well."""

_POLICIES = ("old_log_probs", "ref_log_probs", "rollout_log_probs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What to train and where to write it.

    Attributes:
        make_model: gives the directory, the id or a new module.
        batch: all rows.
        micro_batch_tokens: limit of the engine; None: the share is one micro-batch.
        policies: file of other policies' log-probs; the one process writes it, the layout reads it.
        out: existing folder for results.
        disk_names: whether to call tensors as a checkpoint on disk does, in which each expert has its own; for a
            comparison with engines that do so.
    """

    make_model: Callable[[], str | nn.Module]
    batch: Experience
    micro_batch_tokens: int | None
    policies: Path
    out: Path
    disk_names: bool = False

    def config(self, *, eps: float) -> EngineConfig:
        """An engine's configuration with AdamW."""
        return EngineConfig(
            model=self.make_model(),
            optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=eps),
            max_grad_norm=MAX_GRAD_NORM,
            max_tokens_per_micro_batch=self.micro_batch_tokens,
        )


class _RecordingOptimizer:
    """Steps the engine; keeps the first step's gradients, and their norm after clipping."""

    def __init__(
        self, engine: BaseEngine, record: Callable[[Iterator[tuple[str, Tensor]]], None], *, disk_names: bool
    ) -> None:
        self.engine = engine
        self.record = record
        self.disk_names = disk_names
        self.clipped_norm: float | None = None

    def step(self) -> OptimizerStepResult:
        if self.clipped_norm is not None:
            return self.engine.optimizer_step()
        self.record(full_gradients(self.engine, disk_names=self.disk_names))
        result = self.engine.optimizer_step()
        squares = [float(gradient.double().square().sum()) for _, gradient in full_gradients(self.engine)]
        self.clipped_norm = math.sqrt(sum(squares))
        return result


def measure(build: Callable[[EngineConfig], BaseEngine], job: Measurement, *, reference: bool) -> None:
    """Trains and writes ``rank_<n>.json``, ``rank_<n>.safetensors`` and, on rank 0, the whole model's tensors.

    Collective over all processes of the group.

    Args:
        build: gives an initialized engine.
        job: what to train.
        reference: whether this is the one process, which says what the other policies' log-probs are.
    """
    engine = build(job.config(eps=EPS))
    rank = dist.get_rank()
    rows = rows_of_rank(engine.data_parallel_rank, engine.data_parallel_size)
    inferred = engine.infer_batch(job.batch.select(rows)).log_probs
    if inferred is None:
        raise RuntimeError(f"{type(engine).__name__}.infer_batch gave no log_probs.")
    if reference:
        batch = with_other_policies(job.batch, in_batch_order(job.batch, rows, inferred.cpu()))
        save_file({name: getattr(batch, name).contiguous() for name in _POLICIES}, job.policies)
    else:
        policies: dict[str, Any] = dict(load_file(job.policies))
        batch = dataclasses.replace(job.batch, **policies)
    writer = _Writer(job.out, rank)
    optimizer = _RecordingOptimizer(engine, partial(writer.write, "grads"), disk_names=job.disk_names)
    engine.bind_optimizer(optimizer)
    mine = batch.select(rows)
    loss = loss_function()
    steps = [
        {name: value for name, value in engine.train_batch(mine, loss).items() if name not in engine.own_metrics}
        for _ in range(NUM_STEPS)
    ]
    writer.write("params", full_parameters(engine, disk_names=job.disk_names))
    writer.write("export", _exported(engine, disk_names=job.disk_names))
    save_file({"log_probs": inferred.cpu().contiguous()}, job.out / f"rank_{rank}.safetensors")
    del engine, optimizer.engine
    sensitive = build(job.config(eps=DEFAULT_EPS))
    for _ in range(NUM_STEPS):
        sensitive.train_batch(mine, loss)
    writer.write("params_default_eps", full_parameters(sensitive, disk_names=job.disk_names))
    report = {"rows": rows, "steps": steps, "clipped_norm": optimizer.clipped_norm, "tensors": writer.spreads}
    (job.out / f"rank_{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def in_batch_order(batch: Experience, rows: list[int], values: Tensor) -> Tensor:
    """Per-token values of ``batch.select(rows)`` at their places in ``batch``; NaN where it has no row."""
    starts = batch.cu_seqlens.tolist()
    ordered = torch.full((batch.num_tokens,), torch.nan)
    first = 0
    for row in rows:
        length = starts[row + 1] - starts[row]
        ordered[starts[row] : starts[row + 1]] = values[first : first + length]
        first += length
    return ordered


class _Writer:
    """Rank 0 writes whole tensors; all ranks compare theirs with each other's, since replicas must not drift."""

    def __init__(self, out: Path, rank: int) -> None:
        self.out = out
        self.rank = rank
        self.spreads: dict[str, dict[str, float]] = {}

    def write(self, name: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Drains the iterator. Collective; ``spreads[name]`` keeps the model's order."""
        kept: dict[str, Tensor] = {}
        spreads: dict[str, float] = {}
        for key, tensor in tensors:
            value = tensor.detach().float().contiguous()
            spreads[key] = _spread(value)
            if self.rank == 0:
                kept[key] = value.cpu().clone()
        self.spreads[name] = spreads
        if self.rank == 0:
            save_file(kept, self.out / f"{name}.safetensors")


def _spread(tensor: Tensor) -> float:
    """Largest difference between any two ranks' copies."""
    if dist.get_world_size() == 1 or not tensor.numel():
        return 0.0
    high, low = tensor.clone(), tensor.clone()
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    return float((high - low).max())


def full_parameters(engine: BaseEngine, *, disk_names: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields each parameter by its Hugging Face name, whole, in the model's order. Collective."""
    if isinstance(engine, MegatronEngine):
        return engine.get_per_tensor_param()
    model = _hf_model(engine)
    found = ((name, _whole(parameter.detach())) for name, parameter in model.named_parameters())
    return _on_disk(model, found) if disk_names else found


def full_gradients(engine: BaseEngine, *, disk_names: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields each parameter's gradient by its Hugging Face name, whole; zeros where there is none. Collective."""
    if isinstance(engine, MegatronEngine):
        return engine.get_per_tensor_grad()
    model = _hf_model(engine)
    found = ((name, _whole(_gradient(parameter)).detach()) for name, parameter in model.named_parameters())
    return _on_disk(model, found) if disk_names else found


def _exported(engine: BaseEngine, *, disk_names: bool) -> Iterator[tuple[str, Tensor]]:
    tensors = engine.get_per_tensor_param()
    return tensors if isinstance(engine, MegatronEngine) or not disk_names else _on_disk(_hf_model(engine), tensors)


def _on_disk(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    yield from as_on_disk(model, dict(tensors)).items()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _hf_model(engine: BaseEngine) -> nn.Module:
    if not isinstance(engine, HFEngine):
        raise NotImplementedError(
            f"parity reads parameters and gradients by their Hugging Face names from engines that derive from HFEngine "
            f"or MegatronEngine; {type(engine).__name__} does not."
        )
    return engine.causal_lm
