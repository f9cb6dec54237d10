"""Parameters, gradients and optimizer state sharded over ranks with FSDP2."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from typing_extensions import override

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.hf_engine import HFEngine
from lightning_rlhf.engines.hf_model import PackedModel, prepare_causal_lm
from lightning_rlhf.engines.meta_init import empty_model, fill_shards

_HOST = torch.device("cpu")


class FSDP2Engine(HFEngine):
    """Shards each decoder layer, and the rest at the root, over the mesh's last axis.

    With ``compute_dtype`` bf16 layers compute on bf16 copies of their fp32 parameters, and gradients are reduced in
    fp32. Log-probs and the loss are fp32.

    Args:
        config: how to train.
        device: where this rank computes.
        mesh: ``dp_shard``, or ``dp_replicate x dp_shard`` for hybrid sharding.
        reshard_after_forward: frees a layer's full parameters between its forward and backward.
        cpu_offload: parameters, gradients and optimizer state lie on the host; a layer's come to the device for its
            forward and backward, and the optimizer steps on the host. On CUDA the process group needs gloo for the
            host's tensors (``process_group_backend="cpu:gloo,cuda:nccl"``).

    Raises:
        ValueError: if the mesh has more than two axes.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: torch.device,
        mesh: DeviceMesh,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
    ) -> None:
        super().__init__(config, device=device)
        if mesh.ndim > 2:
            raise ValueError(f"FSDP2Engine takes dp_shard or dp_replicate x dp_shard, got axes {mesh.mesh_dim_names}.")
        self.mesh = mesh
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self._group = mesh.get_group() if mesh.ndim == 1 else _group_of_all(mesh)

    @override
    def build(self) -> PackedModel:
        """Fills the shards from the model's files, if those allow it; else loads it whole and cuts it. Collective.

        Of a directory of safetensors each rank reads the rows of its own shards: on no rank is the model whole.
        """
        empty = empty_model(self.config.model)
        if empty is None:
            return super().build()
        model = self.wrap(prepare_causal_lm(empty, **self.preparations))
        self.shard(model)
        fill_shards(model, model.hf_model, self._directory, device=_HOST if self.cpu_offload else self.device)
        register_fsdp_forward_method(model, "check")
        model.check()
        return model

    @property
    def _directory(self) -> str | Path:
        model = self.config.model
        if isinstance(model, nn.Module):
            raise TypeError(f"A {type(model).__name__} has no directory to be read from.")
        return model

    def place(self, model: PackedModel) -> None:
        """Shards the model, which every rank has loaded whole on the host."""
        model.to(self.device)
        # ranks that were given, or have initialised, different weights would train a mosaic of them
        first = dist.get_global_rank(self._group, 0)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=first, group=self._group)
        self.shard(model)

    def shard(self, model: PackedModel) -> None:
        """Cuts parameters that are on the device, or on the meta device and yet to be filled. Collective."""
        # one replica is plain sharding: an axis of size 1 would cost an all-reduce of nothing at each layer
        names = self.mesh.mesh_dim_names
        mesh = self.mesh[names[1]] if names is not None and len(names) == 2 and self.mesh.size(0) == 1 else self.mesh
        dtype = self.config.compute_dtype
        policy = (
            MixedPrecisionPolicy()
            if dtype is torch.float32
            else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        )
        offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.cpu_offload else OffloadPolicy()
        cut = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
        for layer in model.layers():
            cut(layer, reshard_after_forward=self.reshard_after_forward)
        # The root, too, frees its parameters: after a forward without gradients its full embedding and head would stay,
        # and be used instead of what the optimizer then writes into the shards.
        cut(model, reshard_after_forward=True)
        sum_gradients(model)

    def set_gradient_sync(self, sync: bool) -> None:
        """Reduces gradients in the next backward, or lets full gradients add up on this rank."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(sync)

    @override
    def to(self, device: torch.device, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves the named parts; with ``cpu_offload`` all of them stay on the host."""
        if not self.cpu_offload:
            super().to(device, model=model, optimizer=optimizer, grad=grad)

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among all that hold different rows."""
        return dist.get_rank(self._group)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that hold different rows: all of the mesh."""
        return self.mesh.size()

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """All ranks of the mesh."""
        return self._group


def sum_gradients(model: nn.Module) -> None:
    """Makes FSDP2 sum gradients over ranks instead of averaging them.

    The loss of a mini-batch is ``L = sum_r L_r`` over the ``R`` ranks, with ``L_r = (terms * loss_weights).sum()`` over
    rank ``r``'s rows: ``loss_weights`` hold the global denominator already. So ``dL/dw = sum_r dL_r/dw``, while FSDP2
    gives ``1/R sum_r dL_r/dw``. Its divisor becomes 1; sums are forced because with a divisor of its own it would
    otherwise ask for a pre-multiplied sum, which gloo lacks. Each setting reaches its own module, not its children.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _group_of_all(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    return mesh._flatten().get_group()
