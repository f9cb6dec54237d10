"""Megatron engines, on a ``pp x dp x cp x tp`` mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.engines.megatron.config import Dispatcher, MoEOptions, Recompute, RouterReplay
from lightning_rlhf.engines.megatron.data_parallel import DataParallelOptions
from lightning_rlhf.engines.megatron.engine import MegatronEngine
from lightning_rlhf.engines.megatron.layout import ContextParallelAttention, MegatronLayout, check_world
from lightning_rlhf.strategies.base import RLStrategy


class MegatronRLStrategy(RLStrategy):
    """Cuts models with megatron-core; named ``megatron_rl``.

    The ``tp x cp x pp`` ranks of a model-parallel group hold the same rows; what is left of the processes is data
    parallel. Experts are shared out over the ranks of a stage: ``ep`` and ``etp`` cut the same ranks another way and
    need no processes of their own.

    Args:
        tensor_parallel_size: ranks that share each matrix; neighbours, so that they are on one node.
        pipeline_parallel_size: stages, each with a share of the layers.
        virtual_pipeline_size: model chunks on each stage; more than one interleaves the pipeline.
        expert_parallel_size: ranks that share out the experts.
        expert_tensor_parallel_size: ranks that share each expert's matrices; None: ``tensor_parallel_size``.
        context_parallel_size: ranks that share each sequence.
        sequence_parallel: whether tensor-parallel ranks also share the tokens outside the matrices.
        context_parallel_attention: how keys and values meet queries of other ranks.
        distributed_optimizer: each data-parallel rank holds, and steps, a share of the optimizer's state.
        overlap_grad_reduce: sum gradients while the backward goes on.
        overlap_param_gather: gather updated parameters during the next forward; needs the two before.
        recompute: which activations the backward computes again; None: as the module's ``gradient_checkpointing`` says.
        moe_dispatcher: how tokens reach their experts.
        moe_aux_loss_coef: weight of the balancing loss, over each micro-batch; None: as the model's configuration asks.
        moe_z_loss_coef: weight of the loss that keeps the router's logits small.
        router_replay: the experts that the actor's update sends tokens to: ``off``, those that its routers choose;
            ``old``, those of the pass that computed the old log-probs, where there is one.
        offload_model: keep parameters and gradients in host memory between uses, around a rollout above all; see
            ``EngineConfig.offload_model``.
        offload_optimizer: the optimizer's state likewise.
        timeout_seconds: how long a collective may wait for a peer.
        process_group_backend: ``gloo`` or ``nccl``; None chooses by device.

    Raises:
        ValueError: if settings exclude each other.
    """

    backend = "megatron"

    def __init__(
        self,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        virtual_pipeline_size: int = 1,
        expert_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        context_parallel_size: int = 1,
        sequence_parallel: bool = False,
        context_parallel_attention: ContextParallelAttention = "allgather",
        distributed_optimizer: bool = False,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        recompute: Recompute | None = None,
        moe_dispatcher: Dispatcher = "alltoall",
        moe_aux_loss_coef: float | None = None,
        moe_z_loss_coef: float = 0.0,
        router_replay: RouterReplay = "off",
        offload_model: bool = False,
        offload_optimizer: bool = False,
        timeout_seconds: float = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(timeout_seconds=timeout_seconds, process_group_backend=process_group_backend)
        self.layout = MegatronLayout(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            virtual_pipeline_size=virtual_pipeline_size,
            expert_parallel_size=expert_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
            context_parallel_size=context_parallel_size,
            sequence_parallel=sequence_parallel,
            context_parallel_attention=context_parallel_attention,
        )
        self.data_parallel = DataParallelOptions(
            distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
        )
        self.recompute: Recompute | None = recompute
        self.offload_model = offload_model
        self.offload_optimizer = offload_optimizer
        self.moe = MoEOptions(
            dispatcher=moe_dispatcher,
            aux_loss_coef=moe_aux_loss_coef,
            z_loss_coef=moe_z_loss_coef,
            router_replay=router_replay,
        )

    @override
    def build_mesh(self, world_size: int, device_type: str) -> DeviceMesh:
        check_world(self.layout, world_size)
        # megatron counts its ranks in this order, the last axis fastest
        sizes = {
            "pp": self.layout.pipeline_parallel_size,
            "dp": world_size // self.layout.model_parallel_size,
            "cp": self.layout.context_parallel_size,
            "tp": self.layout.tensor_parallel_size,
        }
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @override
    def engine_arguments(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "data_parallel": self.data_parallel,
            "recompute": self.recompute,
            "moe": self.moe,
        }

    @override
    def adopt_engine(self, role: str, engine: BaseEngine) -> None:
        if isinstance(engine, MegatronEngine) and engine.layout != self.layout:
            raise ValueError(
                f"The module's {role} engine was built by another Trainer in the layout {engine.layout.describe()}, "
                f"this one has {self.layout.describe()}. Start from a new module and pass the checkpoint as ckpt_path=."
            )
        super().adopt_engine(role, engine)

    @property
    @override
    def data_parallel_axes(self) -> tuple[str, ...]:
        return ("dp",)

    @override
    def _print_layout(self) -> None:
        rank_zero_info(
            f"{type(self).__name__}: {self.world_size} process(es) on {self.root_device.type}, "
            f"{self.layout.describe()} dp={self.mesh['dp'].size()}"
        )

    @classmethod
    @override
    def axis_arguments(cls) -> dict[str, str]:
        return {
            "tp": "tensor_parallel_size",
            "pp": "pipeline_parallel_size",
            "vpp": "virtual_pipeline_size",
            "ep": "expert_parallel_size",
            "etp": "expert_tensor_parallel_size",
            "cp": "context_parallel_size",
            "sp": "sequence_parallel",
            "dp": "",
        }

    @classmethod
    @override
    def arguments_of(cls, layout: Mapping[str, int]) -> dict[str, Any]:
        """``dp`` is what processes are left; ``sp=2`` has no meaning, since the ``tp`` ranks share the tokens.

        Raises:
            ValueError: for an ``sp`` above 1.
        """
        if layout.get("sp", 1) > 1:
            raise ValueError(
                f"sp={layout['sp']}: sequence parallelism is shared by the tp ranks; write sp=1 to turn it on."
            )
        given = super().arguments_of({axis: size for axis, size in layout.items() if axis != "dp"})
        return {name: bool(value) if name == "sequence_parallel" else value for name, value in given.items()}

    @classmethod
    @override
    def processes_of(cls, layout: Mapping[str, int]) -> int:
        """``tp x cp x pp x dp``; without ``dp`` the fewest that experts can be shared out over."""
        tp, cp = layout.get("tp", 1), layout.get("cp", 1)
        experts = layout.get("ep", 1) * layout.get("etp", tp)
        fewest = experts // math.gcd(experts, tp * cp)
        return tp * cp * layout.get("pp", 1) * layout.get("dp", fewest)
