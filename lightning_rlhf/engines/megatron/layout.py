"""How the ranks share one model: the sizes of all axes, their checks, and megatron's process groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_rlhf.engines.megatron.families import ModelShape, model_shape

ContextParallelAttention = Literal["allgather", "ulysses", "ring"]
CONTEXT_PARALLEL_ATTENTION: tuple[ContextParallelAttention, ...] = ("allgather", "ulysses", "ring")


@dataclass(frozen=True, kw_only=True)
class MegatronLayout:
    """Sizes of the axes along which one model is cut; the rest of the world is data parallel.

    Ranks are numbered with tensor parallel fastest, then context, data and pipeline parallel.
    """

    tensor_parallel_size: int = 1
    """Ranks that share each matrix."""
    pipeline_parallel_size: int = 1
    """Stages, each with a share of the layers."""
    virtual_pipeline_size: int = 1
    """Model chunks on each stage; more than one interleaves the pipeline."""
    expert_parallel_size: int = 1
    """Ranks that share out the experts."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert's matrices; None: as many as ``tensor_parallel_size``."""
    context_parallel_size: int = 1
    """Ranks that share each sequence, in zigzag order."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also share the tokens outside the matrices."""
    context_parallel_attention: ContextParallelAttention = "allgather"
    """How keys and values meet queries of other ranks."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that see the same batch."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def etp_size(self) -> int:
        """``expert_tensor_parallel_size`` with its default filled in."""
        return self.expert_tensor_parallel_size or self.tensor_parallel_size

    def describe(self) -> str:
        """The sizes in one line, such as ``tp=2 sp pp=2 vpp=2 dp=...``."""
        sizes = {
            "tp": self.tensor_parallel_size,
            "pp": self.pipeline_parallel_size,
            "vpp": self.virtual_pipeline_size,
            "cp": self.context_parallel_size,
            "ep": self.expert_parallel_size,
            "etp": self.etp_size,
        }
        words = [f"{name}={size}" for name, size in sizes.items()]
        if self.sequence_parallel:
            words.insert(1, "sp")
        return " ".join(words)


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's place in megatron's process groups."""

    data_parallel_rank: int
    data_parallel_size: int
    data_parallel_group: Any
    """Ranks that hold the same part of the model and other data; context-parallel ranks are not among them."""
    model_parallel_group: Any
    """Ranks of one data-parallel share: tensor, context and pipeline parallel."""
    model_parallel_rank: int
    is_first_stage: bool
    is_last_stage: bool


def padded_vocab_size(vocab_size: int, layout: MegatronLayout) -> int:
    """The vocabulary with as many rows added as tensor-parallel ranks need for equal shares."""
    return math.ceil(vocab_size / layout.tensor_parallel_size) * layout.tensor_parallel_size


def check_layout(layout: MegatronLayout, hf_config: Any, world_size: int) -> None:
    """Refuse sizes that do not fit the world or the model, before anything is loaded.

    Args:
        layout: the sizes.
        hf_config: of the model.
        world_size: the number of ranks.

    Raises:
        ValueError: names the sizes that do not fit and what would.
    """
    check_world(layout, world_size)
    shape = model_shape(hf_config)
    _check_attention(layout, shape)
    _check_layers(layout, shape)
    _check_experts(layout, shape)


def check_world(layout: MegatronLayout, world_size: int) -> None:
    """The part of ``check_layout`` that needs no model: sizes against each other and against the number of ranks.

    Raises:
        ValueError: names the sizes that do not fit.
    """
    _check_sizes(layout)
    _check_world(layout, world_size)


def _check_sizes(layout: MegatronLayout) -> None:
    for name, size in vars(layout).items():
        if name.endswith("_size") and size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}.")
    if layout.sequence_parallel and layout.tensor_parallel_size == 1:
        raise ValueError("sequence_parallel=True needs tensor_parallel_size above 1, got tensor_parallel_size=1.")
    if layout.virtual_pipeline_size > 1 and layout.pipeline_parallel_size == 1:
        raise ValueError(
            f"virtual_pipeline_size={layout.virtual_pipeline_size} needs pipeline_parallel_size above 1, got "
            f"pipeline_parallel_size=1."
        )
    if layout.context_parallel_attention not in CONTEXT_PARALLEL_ATTENTION:
        raise ValueError(
            f"context_parallel_attention must be one of {', '.join(CONTEXT_PARALLEL_ATTENTION)}, got "
            f"{layout.context_parallel_attention!r}."
        )


def _check_world(layout: MegatronLayout, world_size: int) -> None:
    tp, pp, cp = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"world size {world_size} is not a multiple of tensor_parallel_size {tp} x pipeline_parallel_size {pp} x "
            f"context_parallel_size {cp} = {tp * pp * cp}. Start a multiple of that many processes, or lower a size."
        )
    ep, etp = layout.expert_parallel_size, layout.etp_size
    if world_size % (ep * etp * pp):
        raise ValueError(
            f"world size {world_size} is not a multiple of expert_parallel_size {ep} x expert_tensor_parallel_size "
            f"{etp} x pipeline_parallel_size {pp} = {ep * etp * pp}. Experts are shared by the ranks of one stage "
            f"({world_size // pp}); lower expert_parallel_size or set expert_tensor_parallel_size=1."
        )


def _check_attention(layout: MegatronLayout, shape: ModelShape) -> None:
    tp, cp = layout.tensor_parallel_size, layout.context_parallel_size
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    if heads % tp:
        raise ValueError(
            f"tensor_parallel_size {tp} does not divide the model's {heads} attention heads. Choose a divisor of "
            f"{heads}."
        )
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"tensor_parallel_size {tp} neither divides the model's {kv_heads} key-value heads nor is a multiple of "
            f"them. Choose a divisor or a multiple of {kv_heads}."
        )
    width = (heads + 2 * kv_heads) * shape.head_dim
    if width % tp:
        raise ValueError(
            f"tensor_parallel_size {tp} does not divide the fused query, key and value projection of width {width} "
            f"(({heads} + 2 x {kv_heads}) heads x {shape.head_dim})."
        )
    if layout.context_parallel_attention == "ulysses" and heads // tp % cp:
        raise ValueError(
            f"Ulysses attention shares {heads // tp} heads a rank ({heads} heads / tensor_parallel_size {tp}) among "
            f"context_parallel_size {cp} ranks, which {cp} must divide. Use context_parallel_attention='ring' or "
            f"'allgather', or another size."
        )
    kv_share = max(1, kv_heads // tp)
    if layout.context_parallel_attention == "ulysses" and kv_share % cp and cp % kv_share:
        raise ValueError(
            f"Ulysses attention shares {kv_share} key-value heads a rank ({kv_heads} / tensor_parallel_size {tp}) "
            f"among context_parallel_size {cp} ranks, which {cp} must divide or be a multiple of. Use "
            f"context_parallel_attention='ring' or 'allgather', or another size."
        )


def _check_layers(layout: MegatronLayout, shape: ModelShape) -> None:
    tp, pp, vpp = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.virtual_pipeline_size
    if shape.num_layers % (pp * vpp):
        raise ValueError(
            f"The model's {shape.num_layers} layers cannot be cut into pipeline_parallel_size {pp} x "
            f"virtual_pipeline_size {vpp} = {pp * vpp} equal chunks. Choose sizes whose product divides "
            f"{shape.num_layers}."
        )
    if shape.ffn_size % tp:
        raise ValueError(f"tensor_parallel_size {tp} does not divide the MLP's width {shape.ffn_size}.")


def _check_experts(layout: MegatronLayout, shape: ModelShape) -> None:
    tp, ep, etp = layout.tensor_parallel_size, layout.expert_parallel_size, layout.etp_size
    if shape.moe is None:
        if ep > 1 or layout.expert_tensor_parallel_size not in (None, 1, tp):
            raise ValueError(
                f"expert_parallel_size={ep}, expert_tensor_parallel_size={layout.expert_tensor_parallel_size}: "
                f"{shape.model_type} has no experts. Leave both out."
            )
        return
    if shape.moe.num_experts % ep:
        raise ValueError(
            f"expert_parallel_size {ep} does not divide the model's {shape.moe.num_experts} experts. Choose a divisor "
            f"of {shape.moe.num_experts}."
        )
    if shape.moe.ffn_size % etp:
        raise ValueError(
            f"expert_tensor_parallel_size {etp} does not divide an expert's width {shape.moe.ffn_size}. Choose a "
            f"divisor."
        )
    if shape.moe.shared_ffn_size is not None and shape.moe.shared_ffn_size % tp:
        raise ValueError(
            f"tensor_parallel_size {tp} does not divide the shared expert's width {shape.moe.shared_ffn_size}."
        )
    if tp > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"Experts with tensor_parallel_size {tp} need sequence_parallel=True: without it every tensor-parallel "
            f"rank would send the same tokens to the experts."
        )


def initialize_groups(layout: MegatronLayout) -> ParallelGroups:
    """Make megatron's process groups for a layout; the groups of an earlier layout are destroyed first.

    Collective over the whole world, and cheap when the layout is the one that is in place.

    Args:
        layout: checked by ``check_layout``.

    Raises:
        RuntimeError: if torch.distributed is not initialised.
    """
    global _current
    from megatron.core import parallel_state

    if not dist.is_initialized():
        raise RuntimeError("Megatron's groups are parts of the default process group, which is not initialised yet.")
    world = dist.group.WORLD
    if _current != (layout, world) or not parallel_state.model_parallel_is_initialized():
        destroy_groups()
        vpp = layout.virtual_pipeline_size
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_parallel_size,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=layout.context_parallel_size,
            expert_model_parallel_size=layout.expert_parallel_size,
            expert_tensor_parallel_size=layout.etp_size,
            create_gloo_process_groups=False,
        )
        _model_parallel_groups(layout)
        _current = (layout, world)
    return _facts()


def destroy_groups() -> None:
    """Destroy megatron's process groups, if there are any; the default group stays."""
    global _current, _model_parallel
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    # destroy_model_parallel forgets some (_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP). A process forked from this one
    # would drop them when it makes its own, and wait for ever for the threads of gloo that it has not inherited.
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    _current = None
    _model_parallel = None


def collective_device() -> torch.device:
    """Where collectives of megatron's groups take their tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


_current: tuple[MegatronLayout, Any] | None = None
_model_parallel: Any = None


def _model_parallel_groups(layout: MegatronLayout) -> None:
    """Ranks of one data-parallel share. Megatron's own model-parallel group leaves out context parallelism."""
    global _model_parallel
    world_size = dist.get_world_size()
    inner = layout.tensor_parallel_size * layout.context_parallel_size
    data_parallel = world_size // layout.model_parallel_size
    for share in range(data_parallel):
        # ranks count tp fastest, then cp, dp, pp
        ranks = [
            (stage * data_parallel + share) * inner + place
            for stage in range(layout.pipeline_parallel_size)
            for place in range(inner)
        ]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            _model_parallel = group


def _facts() -> ParallelGroups:
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    return ParallelGroups(
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        data_parallel_group=parallel_state.get_data_parallel_group(),
        model_parallel_group=_model_parallel,
        model_parallel_rank=dist.get_rank(_model_parallel),
        is_first_stage=stage == 0,
        is_last_stage=stage == parallel_state.get_pipeline_model_parallel_world_size() - 1,
    )
