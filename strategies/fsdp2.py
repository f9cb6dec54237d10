"""FSDP2 engines on a ``dp_replicate x dp_shard`` mesh."""

from __future__ import annotations

from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lightning_rlhf.strategies.base import RLStrategy
from lightning_rlhf.strategies.mesh import resolve_sizes


class FSDP2RLStrategy(RLStrategy):
    """Shards parameters, gradients and optimizer state over ``dp_shard`` (FSDP2); named ``fsdp2_rl``.

    Args:
        dp_shard_size: ranks that share one copy of the parameters; ``"auto"`` takes all that ``dp_replicate_size``
            leaves.
        dp_replicate_size: copies of that group (hybrid sharding).
        reshard_after_forward: free a layer's full parameters between its forward and backward.
        cpu_offload: keep parameters, gradients and optimizer state on the host, see ``engines.fsdp2.FSDP2Engine``.
        offload_model: keep parameters and gradients in host memory between uses, around a rollout above all; see
            ``EngineConfig.offload_model``.
        offload_optimizer: the optimizer's state likewise.
        share_prompts: compute the tokens that rollouts of one prompt begin with once in a micro-batch; pays where
            prompts are long beside the responses. See ``EngineConfig.share_prompts``.
        async_save: write checkpoints while training goes on, from a copy in host memory; the next save and the end of
            training wait for the one before, and raise what its writer raised. It takes the name of a checkpoint only
            once it is whole on every rank.
        timeout_seconds: how long a collective may wait for a peer.
        process_group_backend: ``gloo`` or ``nccl``; None chooses by device.
    """

    backend = "fsdp2"

    def __init__(
        self,
        *,
        dp_shard_size: int | Literal["auto"] = "auto",
        dp_replicate_size: int = 1,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        offload_model: bool = False,
        offload_optimizer: bool = False,
        share_prompts: bool = False,
        async_save: bool = False,
        timeout_seconds: float = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(timeout_seconds=timeout_seconds, process_group_backend=process_group_backend)
        self.sizes: dict[str, int | Literal["auto"]] = {"dp_replicate": dp_replicate_size, "dp_shard": dp_shard_size}
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.offload_model = offload_model
        self.offload_optimizer = offload_optimizer
        self.share_prompts = share_prompts
        self.async_save = async_save

    @override
    def build_mesh(self, world_size: int, device_type: str) -> DeviceMesh:
        sizes = resolve_sizes(self.sizes, world_size=world_size)
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @override
    def engine_arguments(self) -> dict[str, Any]:
        return {
            "mesh": self.mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "cpu_offload": self.cpu_offload,
        }

    @property
    @override
    def data_parallel_axes(self) -> tuple[str, ...]:
        return ("dp_replicate", "dp_shard")
