"""The engine contract: the update of one model behind one interface, whatever cuts it up."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rlhf.contracts.micro_batch_counts import MicroBatchCounts
from lightning_rlhf.metrics import Metric, compute_metrics, join_ranks
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs, Role

OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
LRScheduleFactory: TypeAlias = Callable[[Optimizer], LRScheduler]
LossFunction: TypeAlias = Callable[[ModelOutputs, Experience], LossOutput]

ENTRY_POINT_GROUP = "lightning_rlhf.engines"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one model is trained; the same for every back end.

    Attributes:
        role: what the model is to the algorithm.
        model: a Hugging Face directory or id, or a causal-LM ``nn.Module``.
        optimizer: builds the optimizer from the parameters; None for a model that is never trained.
        lr_schedule: builds the learning-rate schedule, stepped once per optimizer step; None keeps it constant.
        max_grad_norm: gradients are scaled down to this global norm; None leaves them.
        micro_batch_size: sequences in one forward-backward on one rank.
        max_tokens_per_micro_batch: tokens in one forward-backward on one rank, a hard limit; excludes
            ``micro_batch_size``. With neither, the whole share is one micro-batch.
        compute_dtype: dtype of the forward and backward; parameters and optimizer stay fp32.
        gradient_checkpointing: recompute each layer's activations in the backward.
        logits_chunk_size: tokens whose logits are held at a time.
        changes: whether parameters change without an optimizer, so that checkpoints hold them: a reference that follows
            the actor.
        share_prompts: computes the tokens that rollouts of one prompt begin with once in a micro-batch, instead of
            once for each. Exact but for rounding, and off by default: it gains where prompts are long beside the
            responses, and not every back end has it.
        lora: a ``contracts.lora.LoRAConfig`` or ``peft.LoraConfig``: trains a low-rank adapter and leaves the model
            frozen; export merges it into copies, checkpoints hold it alone. None trains the parameters that have
            ``requires_grad``: all of a model that is given by its path.
        offload_model: parameters and gradients are in host memory between uses: ``train_mode`` and ``eval_mode`` bring
            them to the device and take them back. On a CPU both are one place, and nothing moves.
        offload_optimizer: the optimizer's state likewise, for ``train_mode`` alone.

    Raises:
        ValueError: if both micro-batch limits are given, or a number is not positive.
    """

    role: Role = "actor"
    model: str | Path | nn.Module
    optimizer: OptimizerFactory | None = None
    lr_schedule: LRScheduleFactory | None = None
    max_grad_norm: float | None = 1.0
    micro_batch_size: int | None = None
    max_tokens_per_micro_batch: int | None = None
    compute_dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False
    logits_chunk_size: int = 512
    changes: bool = False
    share_prompts: bool = False
    lora: object | None = None
    offload_model: bool = False
    offload_optimizer: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be meant, before anything is loaded."""
        for name, source in (("optimizer", "parameters"), ("lr_schedule", "optimizer")):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(
                    f"{name} must be a function that builds it from the {source}, once the model is sharded; got "
                    f"{value!r}. Pass for example functools.partial(torch.optim.AdamW, lr=1e-6)."
                )
        if self.micro_batch_size is not None and self.max_tokens_per_micro_batch is not None:
            raise ValueError(
                f"Give micro_batch_size={self.micro_batch_size} or max_tokens_per_micro_batch="
                f"{self.max_tokens_per_micro_batch}, not both: they are two ways to cut the same mini-batch."
            )
        for name in ("micro_batch_size", "max_tokens_per_micro_batch", "max_grad_norm", "logits_chunk_size"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}.")


@dataclass(frozen=True, kw_only=True)
class OptimizerStepResult:
    """What ``optimizer_step`` did: the global gradient norm before clipping, and whether the parameters moved."""

    grad_norm: float
    stepped: bool


class BoundOptimizer(Protocol):
    """A LightningOptimizer, or anything whose ``step()`` leads to ``engine.optimizer_step()``."""

    def step(self) -> Any:
        """Runs one optimizer step."""


class BaseEngine(ABC):
    """Trains, scores and exports one model.

    A subclass implements the abstract methods; ``train_batch`` is the same for all. Constructed cheaply; nothing is
    loaded before ``initialize()``. Every method that says *collective* must be called by all ranks, in the same order.

    Args:
        config: how to train.
        device: where this rank computes.

    Raises:
        ValueError: if the config asks for what the back end cannot do.
    """

    can_share_prompts: ClassVar[bool] = False
    """Whether the back end computes a prompt once for its rollouts; see ``EngineConfig.share_prompts``."""
    can_adapt: ClassVar[bool] = False
    """Whether the back end trains adapters; see ``EngineConfig.lora``."""
    own_metrics: ClassVar[frozenset[str]] = frozenset()
    """Metrics of ``train_batch`` about the back end itself, which no other one has."""
    trains_beside_the_loss = False
    """Whether rows train the model beside ``loss_function``, as a loss of its experts' balance does."""

    def __init__(self, config: EngineConfig, *, device: torch.device) -> None:
        if config.share_prompts and not self.can_share_prompts:
            raise ValueError(
                f"share_prompts=True does not work with {type(self).__name__}, which computes every rollout's prompt "
                f"by itself. Use the fsdp2 or torch back end, or share_prompts=False."
            )
        if config.lora is not None and not self.can_adapt:
            raise ValueError(
                f"lora= does not work with {type(self).__name__}, which trains all parameters of its model. Use the "
                f"fsdp2, ulysses or torch back end, or lora=None."
            )
        self.config = config
        self.device = device
        self.backend = ""
        self.module: nn.Module = nn.Identity()
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self.last_step: OptimizerStepResult | None = None
        self.last_metrics: dict[str, Metric] = {}
        self.last_counts: MicroBatchCounts | None = None  # of forward_backward_batch; None if it does not count
        self._bound_optimizer: BoundOptimizer | None = None

    @abstractmethod
    def initialize(self) -> None:
        """Loads the model, shards it, builds optimizer and schedule. Collective; sets ``module`` and ``optimizer``."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Brings parameters, gradients and optimizer state to the device; offloads on exit what the config names."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Brings parameters to the device, for forward passes without gradients; offloads on exit as ``train_mode``."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drops all gradients."""

    @abstractmethod
    def forward_backward_batch(
        self, data: Experience, loss_function: LossFunction, *, forward_only: bool = False
    ) -> dict[str, Metric]:
        """Runs all micro-batches of this rank's share of a mini-batch. Collective.

        The loss is ``(terms * data.loss_weights).sum()`` over micro-batches and data-parallel ranks; afterwards each
        parameter's gradient is the gradient of that sum, on every rank that holds it.

        Args:
            data: this rank's rows, with ``loss_weights``; may hold no row on some ranks.
            loss_function: maps model outputs and a micro-batch to per-token terms.
            forward_only: leaves gradients alone.

        Returns:
            This rank's partial metrics, ``loss`` among them.
        """

    @abstractmethod
    def infer_batch(self, data: Experience, *, entropy: bool = False) -> ModelOutputs:
        """Forward without gradients over this rank's rows, outputs in the caller's order. Collective."""

    @abstractmethod
    def optimizer_step(self) -> OptimizerStepResult:
        """Clips, steps, and returns the global gradient norm; skips the step if it is not finite. Collective."""

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yields ``(hf_name, full tensor)``, one at a time. Collective: every rank drains it, also after an error."""

    @abstractmethod
    def save_checkpoint(self, path: Path) -> None:
        """Writes parameters, optimizer state and schedule into the folder ``path``. Collective."""

    @abstractmethod
    def load_checkpoint(self, path: Path) -> None:
        """Reads what ``save_checkpoint`` wrote, also on another number of ranks. Collective."""

    @abstractmethod
    def to(self, device: torch.device, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves the named parts between device and host memory."""

    @property
    @abstractmethod
    def data_parallel_rank(self) -> int:
        """Which share of the rows this rank trains on."""

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """How many shares there are."""

    @property
    @abstractmethod
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different rows; None for one process."""

    @property
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same rows and share the work on them; None where each rank has rows of its own."""
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank speaks for its model-parallel group: outputs are read and logged from it."""
        return self.model_parallel_group is None or dist.get_rank(self.model_parallel_group) == 0

    def checkpoint_writer(self, group: dist.ProcessGroup | None) -> Callable[[Path], None]:
        """Copies to the host what ``save_checkpoint`` writes, and returns what writes the copy. Collective.

        The returned function is called once, with the folder, by every rank, in a thread beside training: it is
        collective over ``group`` and uses no other group, no device and nothing that a later step changes.

        Args:
            group: of all ranks, over the host, for the writers alone; None for one process.

        Raises:
            RuntimeError: if the back end writes only while nothing trains.
        """
        raise RuntimeError(
            f"{type(self).__name__} writes its checkpoints while training waits; use async_save=False with it."
        )

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Within it the model is the frozen base of its adapter.

        Raises:
            RuntimeError: on entering, if the model has no adapter.
        """
        raise RuntimeError(f"{type(self).__name__} trains no adapter, so there is none to disable.")

    def lr_scheduler_step(self) -> None:
        """Moves the learning rate by one optimizer step."""
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def bind_optimizer(self, optimizer: BoundOptimizer | None) -> None:
        """Makes ``train_batch`` step through Lightning, which counts ``global_step`` only there."""
        self._bound_optimizer = optimizer

    def train_batch(self, data: Experience, loss_function: LossFunction) -> dict[str, float]:
        """One optimizer step on one mini-batch. Collective.

        The loop over mini-batches and epochs (``train_mini_batch`` elsewhere) stands above the engine: the step's plan
        shares rows out the same way for any number of ranks, and ``EngineOwner.train_engine`` steps through them and
        joins their metrics.

        Args:
            data: this rank's rows of the mini-batch, with ``loss_weights`` from global counts.
            loss_function: maps model outputs and a micro-batch to per-token terms.

        Returns:
            Metrics over all data-parallel ranks, with ``loss``, ``grad_norm``, ``lr`` and ``skipped_steps``; as
            joinable ``Metric`` they stay in ``last_metrics``, for a caller that takes several steps.
        """
        if self.optimizer is None:
            raise RuntimeError(
                f"The {self.config.role} engine has no optimizer, so it cannot train. Pass optimizer= to its module."
            )
        self.last_step = None  # else a step that is not taken would look like the one before
        with self.train_mode():
            self.zero_grad()
            partial = self.forward_backward_batch(data, loss_function)
            lr = float(self.optimizer.param_groups[0]["lr"])
            if self._bound_optimizer is None:
                self.last_step = self.optimizer_step()
            else:
                self._bound_optimizer.step()
            result = self.last_step
            if result is None:
                raise RuntimeError("The bound optimizer's step() did not reach engine.optimizer_step().")
            self.zero_grad()
        whole = join_ranks(partial, self.data_parallel_group, distributed=self.data_parallel_size > 1)
        # summed within the step; over several steps it is a mean
        loss = whole["loss"].value
        step = {"loss": loss, "grad_norm": torch.tensor(result.grad_norm), "lr": torch.tensor(lr, dtype=torch.float64)}
        skipped = Metric.sum(torch.tensor(float(not result.stepped)))
        self.last_metrics = {**whole, **{k: Metric.of(v) for k, v in step.items()}, "skipped_steps": skipped}
        return compute_metrics(self.last_metrics)


@runtime_checkable
class EngineHost(Protocol):
    """A strategy that builds engines for the module it trains."""

    def create_engine(self, model_type: str, config: EngineConfig) -> BaseEngine:
        """Builds and initializes an engine on this strategy's back end. Collective."""

    def adopt_engine(self, role: str, engine: BaseEngine) -> None:
        """Takes over an engine that an earlier Trainer of the same layout has built.

        Raises:
            ValueError: if it does not fit.
        """


class EngineRegistry:
    """Finds the engine class for a model type, a back end and a device.

    Built-in engines are named by their import path and loaded on first use. Other packages add theirs with
    ``register`` or through the entry-point group ``lightning_rlhf.engines``, whose entries are modules that register.
    """

    _classes: ClassVar[dict[tuple[str, str, str], type[BaseEngine] | str]] = {
        (model_type, backend, device): path
        for (model_type, backend), path in {
            ("language_model", "torch"): "lightning_rlhf.engines.torch:TorchEngine",
            ("language_model", "fsdp2"): "lightning_rlhf.engines.fsdp2:FSDP2Engine",
            ("language_model", "ulysses"): "lightning_rlhf.engines.ulysses:UlyssesEngine",
            ("language_model", "megatron"): "lightning_rlhf.engines.megatron.engine:MegatronEngine",
            ("value_model", "torch"): "lightning_rlhf.engines.value_head:TorchValueEngine",
            ("value_model", "fsdp2"): "lightning_rlhf.engines.value_head:FSDP2ValueEngine",
            ("value_model", "ulysses"): "lightning_rlhf.engines.ulysses:UlyssesValueEngine",
            ("value_model", "megatron"): "lightning_rlhf.engines.megatron.value_engine:MegatronValueEngine",
        }.items()
        for device in ("cpu", "cuda")
    }
    _entry_points_loaded: ClassVar[bool] = False

    @classmethod
    def register(cls, *, model_type: str, backend: str, device: str) -> Callable[[type[BaseEngine]], type[BaseEngine]]:
        """A class decorator that makes an engine known.

        Raises:
            ValueError: if another class holds the place.
        """

        def add(engine_class: type[BaseEngine]) -> type[BaseEngine]:
            key = (model_type, backend, device)
            if cls._classes.setdefault(key, engine_class) is not engine_class:
                raise ValueError(f"An engine for {key} is registered already: {cls._classes[key]}.")
            return engine_class

        return add

    @classmethod
    def get(cls, model_type: str, backend: str, device: str) -> type[BaseEngine]:
        """The class registered for the three.

        Raises:
            KeyError: if there is none; the message lists what is registered.
        """
        key = (model_type, backend, device)
        if key not in cls._classes and not cls._entry_points_loaded:
            cls._entry_points_loaded = True
            for entry in entry_points(group=ENTRY_POINT_GROUP):
                entry.load()
        if key not in cls._classes:
            known = "; ".join("/".join(k) for k in sorted(cls._classes))
            raise KeyError(
                f"No engine for model_type={model_type!r}, backend={backend!r}, device={device!r}. Registered: {known}."
            )
        found = cls._classes[key]
        if isinstance(found, str):
            module_name, _, class_name = found.partition(":")
            found = cls._classes[key] = getattr(importlib.import_module(module_name), class_name)
        return found

    @classmethod
    def new(
        cls, model_type: str, backend: str, config: EngineConfig, *, device: torch.device, **kwargs: Any
    ) -> BaseEngine:
        """Builds the engine; its ``initialize()`` is left to the caller."""
        engine = cls.get(model_type, backend, device.type)(config, device=device, **kwargs)
        engine.backend = backend
        return engine
