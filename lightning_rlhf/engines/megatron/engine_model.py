"""The part of the engine contract that is about the model: building, modes, weights, checkpoints, places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.engines.megatron import checkpoint, heads
from lightning_rlhf.engines.megatron.backend import MegatronBackend, choose_backend
from lightning_rlhf.engines.megatron.config import MoEOptions, Recompute
from lightning_rlhf.engines.megatron.data_parallel import (
    DataParallelOptions,
    gather_gradients,
    main_gradient,
    whole_parameters,
    wrap,
)
from lightning_rlhf.engines.megatron.embedding import freeze_padding_row
from lightning_rlhf.engines.megatron.expert_load import ExpertLoad
from lightning_rlhf.engines.megatron.export import export_parameters
from lightning_rlhf.engines.megatron.families import model_shape
from lightning_rlhf.engines.megatron.layout import MegatronLayout, ParallelGroups, check_layout, initialize_groups
from lightning_rlhf.engines.megatron.load import load_parameters
from lightning_rlhf.engines.megatron.model import build_model
from lightning_rlhf.engines.megatron.offload import move_model, move_optimizer
from lightning_rlhf.engines.megatron.optimizer import MegatronOptimizer
from lightning_rlhf.engines.megatron.router_replay import ExpertChoices
from lightning_rlhf.engines.megatron.source import hf_config_of, weight_source
from lightning_rlhf.engines.residence import Residence


class MegatronModel(BaseEngine):
    """A model that megatron-core has cut: how it is built, held, moved, saved and told to others.

    Args:
        config: how to train; ``gradient_checkpointing`` recomputes each layer, unless ``recompute`` says which part.
        device: where this rank computes.
        layout: sizes of the axes.
        data_parallel: how gradients and optimizer state lie on data-parallel ranks.
        recompute: which activations the backward computes again; None: as ``config.gradient_checkpointing`` says.
        moe: options of a mixture of experts; None: the defaults.
    """

    value_head: ClassVar[bool] = False

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: torch.device,
        layout: MegatronLayout | None = None,
        data_parallel: DataParallelOptions | None = None,
        recompute: Recompute | None = None,
        moe: MoEOptions | None = None,
    ) -> None:
        super().__init__(config, device=device)
        self.residence = Residence(self)
        self.layout = layout or MegatronLayout()
        self.data_parallel = data_parallel or DataParallelOptions()
        self.recompute: Recompute = recompute or ("full" if config.gradient_checkpointing else "none")
        self.moe = moe or MoEOptions()
        self.chunks: list[Any] = []
        self._hf_config: Any = None
        self._groups: ParallelGroups | None = None
        self._machine: MegatronBackend | None = None
        self._expert_choices: ExpertChoices | None = None
        self._expert_load: ExpertLoad | None = None

    # --- building -----------------------------------------------------------------------------------------------

    @override
    def initialize(self) -> None:
        """Checks the layout, makes megatron's groups, builds and fills this rank's part. Collective.

        Raises:
            ValueError: if the layout does not fit the processes or the model; before weights are read.
        """
        self._machine = choose_backend(self.device.type)
        hf_config = self._hf_config = hf_config_of(self.config.model)
        check_layout(self.layout, hf_config, dist.get_world_size())
        self._check_experts(has_experts=model_shape(hf_config).moe is not None)
        source = weight_source(self.config.model)
        with self._machine.active():
            self._groups = initialize_groups(self.layout)
            chunks = build_model(
                hf_config,
                layout=self.layout,
                backend=self._machine,
                compute_dtype=self.config.compute_dtype,
                value_head=self.value_head,
                recompute=self.recompute,
                moe=self.moe,
            )
            load_parameters(chunks, source, hf_config=hf_config)
            self._prepare(chunks)
        # without megatron's wrappers, so that a trained and a frozen engine call their parameters alike
        self.module = nn.ModuleList(self.bare_chunks).train(self.config.optimizer is not None)
        self.module.register_state_dict_post_hook(_tensors_alone)
        self.residence.leave()

    def _check_experts(self, *, has_experts: bool) -> None:
        if self._replays and not has_experts:
            raise ValueError(
                f"router_replay={self.moe.router_replay!r} is for a mixture of experts, and "
                f"{self._hf_config.model_type} has none. Leave it out."
            )

    @property
    def _replays(self) -> bool:
        # of the policy alone: a reference or a critic has other weights, to which these choices mean nothing
        return self.config.role == "actor" and self.moe.router_replay != "off"

    def _prepare(self, chunks: list[nn.Module]) -> None:
        config = vars(chunks[0])["config"]
        if config.num_moe_experts is not None:
            self.trains_beside_the_loss = bool(
                config.moe_aux_loss_coeff or config.moe_z_loss_coeff or config.moe_router_bias_update_rate
            )
            self._expert_choices = ExpertChoices(chunks) if self._replays else None
            self._expert_load = None if self.config.optimizer is None else ExpertLoad(chunks)
        for chunk in chunks:
            if vars(chunk)["pre_process"]:
                freeze_padding_row(chunk, self._hf_config.pad_token_id)
            if vars(chunk)["post_process"] and not self.value_head:
                heads.give_hidden_states(chunk)
        if self.config.optimizer is None:
            self.chunks = [chunk.requires_grad_(False) for chunk in chunks]
            return
        self.chunks = wrap(chunks, self.data_parallel)
        self.optimizer = MegatronOptimizer(
            self.chunks,
            self.config.optimizer,
            params_dtype=self.config.compute_dtype,
            distributed=self.data_parallel.distributed_optimizer,
            overlap_param_gather=self.data_parallel.overlap_param_gather,
        )
        if self.config.lr_schedule is not None:
            self.lr_scheduler = self.config.lr_schedule(self.optimizer)

    @property
    def machine(self) -> MegatronBackend:
        """The back end in whose scope every call into megatron stands.

        Raises:
            RuntimeError: before ``initialize``.
        """
        if self._machine is None:
            raise RuntimeError(f"{type(self).__name__} has no model yet: call initialize() first.")
        return self._machine

    @property
    def groups(self) -> ParallelGroups:
        """This rank's place in megatron's groups.

        Raises:
            RuntimeError: before ``initialize``.
        """
        if self._groups is None:
            raise RuntimeError(f"{type(self).__name__} has no groups yet: call initialize() first.")
        return self._groups

    @property
    def bare_chunks(self) -> list[Any]:
        """The model chunks without megatron's DistributedDataParallel around them."""
        return [chunk.module for chunk in self.chunks] if self.optimizer is not None else self.chunks

    # --- modes --------------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Training mode, with gradients; parameters, gradients and optimizer state on the device."""
        with self.residence.on_device(optimizer=True), self._mode(True), torch.enable_grad():
            yield

    @override
    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Evaluation mode, without gradients; parameters on the device."""
        with self.residence.on_device(optimizer=False), self._mode(False), torch.no_grad():
            yield

    @contextmanager
    def _mode(self, train: bool) -> Iterator[None]:
        was_training = self.module.training
        self.module.train(train)
        try:
            yield
        finally:
            self.module.train(was_training)

    @override
    def zero_grad(self) -> None:
        """Drops all gradients."""
        if self.optimizer is not None:
            with self.machine.active():
                self.optimizer.zero_grad(set_to_none=True)

    def _megatron_optimizer(self) -> MegatronOptimizer:
        if not isinstance(self.optimizer, MegatronOptimizer):
            raise RuntimeError(f"The {self.config.role} engine has no optimizer; its config names none.")
        return self.optimizer

    # --- weights ------------------------------------------------------------------------------------------------

    @override
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yields ``(hf_name, full tensor)``, one at a time, detached. Collective; every rank drains it.

        A tensor is valid until the next one is asked for. A head tied to the embedding has no entry of its own.
        """
        return self._export(lambda parameter: parameter)

    def get_per_tensor_grad(self) -> Iterator[tuple[str, Tensor]]:
        """Yields ``(hf_name, full gradient)`` of what ``forward_backward_batch`` has left. Collective."""
        self._megatron_optimizer()
        with self.machine.active():
            gather_gradients(self.chunks, self.data_parallel)
        return self._export(main_gradient)

    def _export(self, tensor_of: Any) -> Iterator[tuple[str, Tensor]]:
        with self.residence.reachable():
            # The consumer's own work between two tensors must not run inside megatron's scope.
            tensors = export_parameters(self.bare_chunks, hf_config=self._hf_config, tensor_of=tensor_of)
            with self.machine.active(), whole_parameters(self.chunks, self.data_parallel):
                pass
            while True:
                with self.machine.active(), torch.no_grad():
                    item = next(tensors, None)
                if item is None:
                    return
                yield item

    @override
    def save_checkpoint(self, path: Path) -> None:
        """Writes parameters, optimizer state and schedule into the folder ``path``. Collective."""
        whole = whole_parameters(self.chunks, self.data_parallel)
        with self.residence.reachable(optimizer=True), self.machine.active(), whole:
            checkpoint.save(path, self._checkpointed())

    @override
    def load_checkpoint(self, path: Path) -> None:
        """Reads what ``save_checkpoint`` wrote, also in another layout; see ``checkpoint.load``. Collective."""
        with self.residence.reachable(optimizer=True), self.machine.active():
            checkpoint.load(path, self._checkpointed())

    def _checkpointed(self) -> checkpoint.Checkpointed:
        return checkpoint.Checkpointed(
            chunks=self.bare_chunks,
            optimizer=self._megatron_optimizer() if self.optimizer is not None else None,
            lr_scheduler=self.lr_scheduler,
            layout=self.layout,
            data_parallel=self.data_parallel,
        )

    @override
    def to(self, device: torch.device, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves the named parts between device and host memory; gradients are dropped on the way."""
        if device.type == self.device.type == "cpu":
            return  # both are one place
        move_model(self.chunks, device, parameters=model, gradients=grad)
        if optimizer and self.optimizer is not None:
            move_optimizer(self._megatron_optimizer(), device)

    # --- places -------------------------------------------------------------------------------------------------

    @property
    @override
    def data_parallel_rank(self) -> int:
        """This rank's model-parallel group's place among those that hold other rows."""
        return self.groups.data_parallel_rank

    @property
    @override
    def data_parallel_size(self) -> int:
        """Model-parallel groups."""
        return self.groups.data_parallel_size

    @property
    @override
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """One rank of each such group: those with this rank's place in its own; None for one."""
        group: dist.ProcessGroup = self.groups.data_parallel_group
        return group if self.groups.data_parallel_size > 1 else None

    @property
    @override
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ``tp x cp x pp`` ranks that hold the same rows; None for one."""
        group: dist.ProcessGroup = self.groups.model_parallel_group
        return group if self.layout.model_parallel_size > 1 else None


def _tensors_alone(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """Leaves out what megatron's layers keep beside tensors: of fp8 alone, and nothing that a checkpoint needs."""
    for name in [name for name in state if name.startswith(prefix) and name.endswith("_extra_state")]:
        del state[name]
