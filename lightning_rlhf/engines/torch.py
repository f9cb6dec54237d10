"""One process holds the whole model: the reference that sharded engines are compared with."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.hf_engine import HFEngine
from lightning_rlhf.engines.hf_model import PackedModel


class TorchEngine(HFEngine):
    """Trains an unsharded model; with a process group, one replica on each rank, gradients summed after the backward.

    With ``compute_dtype`` bf16 the forward autocasts: matrix products in bf16, norms and residuals in fp32. FSDP2
    instead computes wholly on bf16 copies of the parameters, so the two agree to bf16's precision only. Log-probs and
    the loss are fp32 in both.

    Args:
        config: how to train.
        device: where to compute.
        process_group: data-parallel ranks with a replica each; None for one process.
    """

    def __init__(
        self, config: EngineConfig, *, device: torch.device, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(config, device=device)
        self._group = process_group

    def place(self, model: PackedModel) -> None:
        """Moves the model to the device; all replicas take the first rank's parameters."""
        model.to(self.device)
        if self._group is not None:
            for parameter in model.parameters():
                dist.broadcast(parameter.data, group=self._group, group_src=0)

    def set_gradient_sync(self, sync: bool) -> None:
        """Nothing: gradients add up locally, and ``finish_gradients`` sums them."""

    def finish_gradients(self) -> None:
        """Sums gradients over the replicas: each rank's loss is its part of one sum, so there is nothing to divide."""
        if self._group is not None:
            for parameter in self.packed.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self._group)

    def autocast(self) -> torch.autocast:
        """Autocast to ``compute_dtype``, unless that is fp32."""
        dtype = self.config.compute_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not torch.float32)

    @property
    def data_parallel_rank(self) -> int:
        """This replica's rank."""
        return 0 if self._group is None else dist.get_rank(self._group)

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas."""
        return 1 if self._group is None else dist.get_world_size(self._group)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The replicas' group; None for one process."""
        return self._group
