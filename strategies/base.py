"""What every RL strategy shares: processes, engines, and checkpoints that are whole or absent."""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineRegistry
from lightning_rlhf.contracts.precision import compute_dtype_of
from lightning_rlhf.contracts.process_groups import BESIDE_TRAINING
from lightning_rlhf.strategies import checkpoints
from lightning_rlhf.strategies.background import BackgroundSave
from lightning_rlhf.strategies.processes import die_with_parent
from lightning_rlhf.strategies.sigterm import SigtermNote

T = TypeVar("T")


class EnginePrecision(Precision):
    """Lightning's plugin reduced to a name: the engine casts, nothing autocasts around ``training_step``."""

    def __init__(self, precision: str) -> None:
        self.precision = precision  # type: ignore[assignment]


class RLStrategy(ParallelStrategy):
    """A Lightning strategy whose engines train the models of an RL module.

    It launches one process per device, builds a named mesh, creates the engines that the module asks for, and saves
    and loads their state. A subclass says how the mesh is laid out and which back end its engines have.

    Args:
        timeout_seconds: how long a collective may wait for a peer.
        process_group_backend: ``gloo`` or ``nccl``; None chooses by device.
    """

    backend: str
    share_prompts: bool = False
    """Whether its engines share prompts also where a module's config does not ask for it."""
    offload_model: bool = False
    offload_optimizer: bool = False
    """What of its engines is in host memory between uses, see ``EngineConfig``."""
    async_save: bool = False
    """Whether checkpoints are written while training goes on."""

    def __init__(self, *, timeout_seconds: float = 1800.0, process_group_backend: str | None = None) -> None:
        super().__init__()
        self.timeout_seconds = timeout_seconds
        self.process_group_backend = process_group_backend
        self.num_nodes = 1
        self.engines: dict[str, BaseEngine] = {}
        self._mesh: DeviceMesh | None = None
        self.background = BackgroundSave()
        self._save_group: dist.ProcessGroup | None = None
        self._sigterm: SigtermNote | None = None

    # --- the layout ---------------------------------------------------------------------------------------------

    @abstractmethod
    def build_mesh(self, world_size: int, device_type: str) -> DeviceMesh:
        """Lays the ranks out on named axes.

        Raises:
            ValueError: if the sizes do not multiply to the world size.
        """

    @abstractmethod
    def engine_arguments(self) -> dict[str, Any]:
        """What this back end's engines are given beside their config, the mesh among it."""

    @property
    @abstractmethod
    def data_parallel_axes(self) -> tuple[str, ...]:
        """Axes of the mesh along which ranks hold different rows."""

    @classmethod
    def axis_arguments(cls) -> dict[str, str]:
        """Axis of a layout such as ``dp_shard=2,sp=2`` to the constructor's argument that takes its size."""
        suffix = "_size"
        names = [name for name in inspect.signature(cls).parameters if name.endswith(suffix)]
        return {name.removesuffix(suffix): name for name in names}

    @classmethod
    def arguments_of(cls, layout: Mapping[str, int]) -> dict[str, Any]:
        """The constructor's arguments for a layout whose axes are among ``axis_arguments``."""
        arguments = cls.axis_arguments()
        return {arguments[axis]: size for axis, size in layout.items()}

    @classmethod
    def processes_of(cls, layout: Mapping[str, int]) -> int:
        """How many processes a layout takes."""
        return math.prod(layout.values())

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh, once processes have started."""
        if self._mesh is None:
            raise RuntimeError(f"{type(self).__name__}.mesh exists only once Trainer has started the processes.")
        return self._mesh

    def create_engine(self, model_type: str, config: EngineConfig) -> BaseEngine:
        """Builds and initializes an engine on this back end, in the Trainer's precision. Collective."""
        config = dataclasses.replace(
            config,
            compute_dtype=self._compute_dtype,
            share_prompts=config.share_prompts or self.share_prompts,
            offload_model=config.offload_model or self.offload_model,
            offload_optimizer=config.offload_optimizer or self.offload_optimizer,
        )
        engine = EngineRegistry.new(
            model_type, self.backend, config, device=self.root_device, **self.engine_arguments()
        )
        engine.initialize()
        self.engines[config.role] = engine
        return engine

    def adopt_engine(self, role: str, engine: BaseEngine) -> None:
        """Takes over an engine that an earlier Trainer has built on the same layout and in the same precision.

        Raises:
            ValueError: if it does not fit; the message names the difference.
        """
        facts = {
            "back end": (engine.backend, self.backend),
            "data-parallel size": (engine.data_parallel_size, self.distributed_sampler_kwargs["num_replicas"]),
            "compute dtype": (engine.config.compute_dtype, self._compute_dtype),
        }
        for name, (has, wanted) in facts.items():
            if has != wanted:
                raise ValueError(
                    f"The module's {role} engine was built by another Trainer with {name} {has}, this one {wanted}. "
                    f"Start from a new module and pass the checkpoint as ckpt_path=."
                )
        self.engines[role] = engine

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        size, rank = 1, 0
        for axis in self.data_parallel_axes:
            size, rank = size * self.mesh[axis].size(), rank * self.mesh[axis].size() + self.mesh[axis].get_local_rank()
        return {"num_replicas": size, "rank": rank}

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning to respect ``sync_dist``, which it does for its own strategies only."""
        return True

    # --- precision ----------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """A plugin that only names the precision; casting is the engine's."""
        return self._precision_plugin if self._precision_plugin is not None else EnginePrecision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is None:  # Lightning takes a plugin that is there before the Trainer's for the user's own choice
            self._precision_plugin = None
            return
        compute_dtype_of(plugin.precision, strategy=type(self).__name__)  # refuses what it does not know
        self._precision_plugin = EnginePrecision(str(plugin.precision))

    @property
    def _compute_dtype(self) -> torch.dtype:
        return compute_dtype_of(self.precision_plugin.precision, strategy=type(self).__name__)

    # --- processes ----------------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        if self.parallel_devices is None:
            raise RuntimeError(f"{type(self).__name__} has no devices yet; it is set up by Trainer(strategy=...).")
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is None:
            raise RuntimeError("Trainer has not given the strategy a cluster environment.")
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if isinstance(self.cluster_environment, LightningEnvironment) and self.local_rank > 0:
            die_with_parent()  # rank 0 started this process; without it, it would wait for the timeout
        reset_seed()
        self._set_world_ranks()
        if self.cluster_environment is None:
            raise RuntimeError("Trainer has not given the strategy a cluster environment.")
        limit = timedelta(seconds=self.timeout_seconds)
        backend = self.process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        _init_dist_connection(
            self.cluster_environment,
            backend,
            timeout=limit,
            device_id=None if self.root_device.type == "cpu" else self.root_device,
        )
        self._mesh = self.build_mesh(self.world_size, self.root_device.type)
        if self.async_save and self._save_group is None:
            # for the writers alone: their threads must not come between the collectives of training
            self._save_group = dist.new_group(backend="gloo", timeout=limit, group_desc=BESIDE_TRAINING)
        self._print_layout()

    def _print_layout(self) -> None:
        axes = ", ".join(f"{name}={self.mesh.size(dim)}" for dim, name in enumerate(self.mesh.mesh_dim_names or ()))
        rank_zero_info(f"{type(self).__name__}: {self.world_size} process(es) on {self.root_device.type}, {axes}")

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            # a launcher such as torchrun has the last word on the world size; never train on fewer ranks in silence
            if self.world_size != self.num_nodes * self.num_processes:
                raise ValueError(
                    f"The launcher started {self.world_size} process(es), but Trainer(devices={self.num_processes}, "
                    f"num_nodes={self.num_nodes}) asks for {self.num_nodes * self.num_processes}; make them equal."
                )
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.accelerator is None:
            raise RuntimeError("Trainer has not given the strategy an accelerator.")
        self.accelerator.setup(trainer)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        """Nothing: engines place their own parameters."""

    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        return nullcontext()

    @override
    def barrier(self, name: str | None = None) -> None:
        if _distributed_is_initialized():
            dist.barrier(device_ids=None if self.root_device.type == "cpu" else [self.root_device.index])

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not _distributed_is_initialized():
            return obj
        # Trainer's own metadata (paths, flags) between the processes of one job, over the job's process group
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    @override
    def teardown(self) -> None:
        try:
            self.finish_save()
        finally:
            self.engines.clear()
            super().teardown()

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's own parameters and buffers; those of its engines are in the engines' folders."""
        if self.lightning_module is None:
            return {}
        of_engines = self._names_of_engines()
        return {name: value for name, value in self.lightning_module.state_dict().items() if name not in of_engines}

    def _names_of_engines(self) -> set[str]:
        """Names in the module of parameters and buffers that engines hold, its own names for them among these."""
        if self.lightning_module is None:
            return set()
        modules = [engine.module for engine in self.engines.values()]
        held = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
        module = self.lightning_module
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return {name for name, tensor in named if id(tensor) in held or name.startswith("engine_modules.")}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.lightning_module is None:
            raise RuntimeError("There is no module to load a checkpoint into.")
        missing, unexpected = self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)
        missing = sorted(set(missing) - self._names_of_engines())
        if strict and (missing or unexpected):
            raise RuntimeError(f"Checkpoint and module differ: missing {missing}, unexpected {unexpected}.")

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: the engine saves its optimizer, sharded, beside its parameters."""
        return {}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: the engines loaded theirs in ``load_checkpoint``."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes folders on a file system; it takes no storage_options.")
        checkpoints.save(self, checkpoint, Path(self.broadcast(str(filepath))))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if weights_only is False:
            raise ValueError(f"{type(self).__name__} never unpickles a checkpoint; drop weights_only=False.")
        self.finish_save()
        return checkpoints.load(self, Path(self.broadcast(str(checkpoint_path))))

    @override
    def on_train_start(self) -> None:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        self._sigterm = SigtermNote(trainer) if trainer is not None and self.world_size > 1 else None

    @override
    def on_train_end(self) -> None:
        if self._sigterm is not None:
            self._sigterm.end()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if self._sigterm is not None:
            self._sigterm.tell()
        return output

    @property
    def save_group(self) -> dist.ProcessGroup | None:
        """All ranks, for writers beside training; None where checkpoints are written at once."""
        return self._save_group if self.async_save else None

    def finish_save(self) -> bool:
        """Waits for the checkpoint that is being written, if one is: whether there was one.

        Raises:
            RuntimeError: if it could not be written on every rank, with the reason.
        """
        return self.background.wait()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Lets a checkpoint in writing become whole; training's own error is the one that is raised."""
        super().on_exception(exception)
        try:
            self.finish_save()
        except Exception as error:  # noqa: BLE001 - said here; raising it would hide the one that ended training
            rank_zero_warn(f"A checkpoint that was being written when training ended is lost: {error}")
