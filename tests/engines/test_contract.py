"""The back ends through the engine contract, and engines that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fork import run_distributed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from engines.by_hand import Subject
from engines.contract import CHECKS, Check, all_checks
from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineRegistry, OptimizerStepResult
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.types import Experience, ModelOutputs

CPU = torch.device("cpu")


def _layout(backend: str) -> dict[str, Any]:
    """What the back end's class takes beside the configuration, on this rank."""
    world_size = dist.get_world_size()
    if backend == "torch":
        return {"process_group": dist.group.WORLD}
    if backend == "fsdp2":
        return {"mesh": init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))}
    return {"mesh": init_device_mesh("cpu", (1, 1, world_size), mesh_dim_names=("dp_replicate", "dp_shard", "sp"))}


def _subject(model_type: str, backend: str) -> Subject:
    def make(config: EngineConfig) -> BaseEngine:
        kwargs = _layout(backend) if dist.is_initialized() else {}
        return EngineRegistry.new(model_type, backend, config, device=CPU, **kwargs)

    return Subject(model_type=model_type, make=make)


BACKENDS = {"torch": ("torch", 0), "torch-2": ("torch", 2), "fsdp2-1": ("fsdp2", 1), "fsdp2-2": ("fsdp2", 2)}
BACKENDS["ulysses-sp2"] = ("ulysses", 2)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_one_process(model_type: str, check: Check, tmp_path: Path) -> None:
    check(_subject(model_type, "torch"), tmp_path)


@pytest.mark.parametrize(("backend", "world_size"), [("torch", 2), ("fsdp2", 1), ("fsdp2", 2), ("ulysses", 2)])
@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_ranks(model_type: str, backend: str, world_size: int, tmp_path: Path) -> None:
    run_distributed(all_checks, world_size, _subject(model_type, backend), tmp_path, timeout=120)


# --- negative controls: an engine with one fault, and the check that finds it ----------------------------------------


class _HalvesTheLoss(TorchEngine):
    def _loss(self, *args: Any) -> Any:
        loss, metrics = super()._loss(*args)
        return loss / 2, metrics


class _ClipsBeforeItMeasures(TorchEngine):
    def optimizer_step(self) -> OptimizerStepResult:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        return super().optimizer_step()


class _ForgetsTheSchedule(TorchEngine):
    def lr_scheduler_step(self) -> None:
        pass


class _PackedOrder(TorchEngine):
    def infer_batch(self, data: Experience, *, entropy: bool = False) -> ModelOutputs:
        return super().infer_batch(data.select(data.lengths.argsort(descending=True)), entropy=entropy)


class _StaysInEvaluation(TorchEngine):
    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        self.module.eval()
        with torch.no_grad():
            yield


class _StaysOnTheDevice(TorchEngine):
    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        self.to(self.device, optimizer=False)
        with self._mode(False), torch.no_grad():
            yield


class _BackwardAnyway(TorchEngine):
    def forward_backward_batch(self, *args: Any, forward_only: bool = False) -> Any:
        with torch.enable_grad():
            return super().forward_backward_batch(*args)


class _OffloadsIntoNothing(TorchEngine):
    def to(self, device: torch.device, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super().to(device, model=model, optimizer=optimizer, grad=grad)
        if not model and self.optimizer is not None:
            self.optimizer.state.clear()


class _ForgetsMoments(TorchEngine):
    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        assert self.optimizer is not None
        self.optimizer.state.clear()


class _NamesOfItsOwn(TorchEngine):
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        return ((f"hf_{name}", value) for name, value in super().get_per_tensor_param())


class _SendsTheTiedHeadTwice(TorchEngine):
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, value.detach()) for name, value in self.hf_model.named_parameters(remove_duplicate=False))


class _CountsFromOne(TorchEngine):
    data_parallel_rank = property(lambda self: 1)  # type: ignore[assignment]


class _StepsIntoTheDark(TorchEngine):
    def optimizer_step(self) -> OptimizerStepResult:
        assert self.optimizer is not None
        result = super().optimizer_step()
        if not result.stepped:
            self.optimizer.step()
        return result


class _MeanOverNothing(TorchEngine):
    def _loss(self, micro_batch: Experience, *args: Any) -> Any:
        loss, metrics = super()._loss(micro_batch, *args)
        return loss * (micro_batch.tokens.float().mean() * 0 + 1), metrics


class _TrainsWithoutOptimizer(TorchEngine):
    def optimizer_step(self) -> OptimizerStepResult:
        return OptimizerStepResult(grad_norm=0.0, stepped=True)


FAULTS: list[tuple[Callable[..., BaseEngine], str]] = [
    (_HalvesTheLoss, "train_batch_is_the_sum_over_sequences"),
    (_ClipsBeforeItMeasures, "train_batch_is_the_sum_over_sequences"),
    (_ForgetsTheSchedule, "train_batch_is_the_sum_over_sequences"),
    (_PackedOrder, "outputs_come_in_the_callers_order"),
    (_StaysInEvaluation, "modes_set_the_model_and_put_it_back"),
    (_BackwardAnyway, "forward_only_leaves_gradients_alone"),
    (_OffloadsIntoNothing, "offloading_changes_no_number"),
    (_StaysOnTheDevice, "modes_bring_and_take_what_the_config_names"),
    (_ForgetsMoments, "a_loaded_checkpoint_goes_on"),
    (_NamesOfItsOwn, "parameters_leave_whole_under_hugging_face_names"),
    (_SendsTheTiedHeadTwice, "parameters_leave_whole_under_hugging_face_names"),
    (_CountsFromOne, "ranks_know_their_places"),
    (_StepsIntoTheDark, "a_gradient_that_is_not_finite_moves_nothing"),
    (_MeanOverNothing, "a_rank_without_rows_joins_the_others"),
    (_TrainsWithoutOptimizer, "a_model_without_optimizer_scores_and_does_not_train"),
]


@pytest.mark.parametrize(("engine", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_negative_control_a_fault_is_found(engine: Callable[..., BaseEngine], check: str, tmp_path: Path) -> None:
    subject = Subject(model_type="language_model", make=lambda config: engine(config, device=CPU))
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        CHECKS[check](subject, tmp_path)


def test_every_check_has_an_engine_that_fails_it() -> None:
    assert {check for _, check in FAULTS} == set(CHECKS)
