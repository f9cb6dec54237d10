"""What a rank of ``megatron_rl`` takes, in bytes, from sizes alone.

Parameters are in the compute dtype; with bf16 the optimizer keeps fp32 ones of its own. Gradients are fp32, and the
rank's lie whole from the first micro-batch to the last. Norms and routers, which are not cut, are counted as if they
were: they are less than a thousandth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_rlhf.cli.estimate import FP32, ModelShape
from lightning_rlhf.cli.layout_checks import megatron_layout
from lightning_rlhf.engines.megatron.layout import MegatronLayout


def parameters_of_rank(shape: ModelShape, layout: MegatronLayout) -> tuple[int, int]:
    """Parameters on a rank of the fullest stage: dense ones, and those of experts.

    A stage has ``ceil(L / pp)`` layers. With several, the first has the embedding and the last the head, as large; with
    one, it has both. Matrices are cut over ``tp``, experts over ``ep x etp``.
    """
    pipeline = layout.pipeline_parallel_size
    layers = -(-shape.num_layers // pipeline)
    root = shape.root_parameters if pipeline == 1 else shape.vocab_size * shape.hidden_size
    dense = layers * (shape.layer_parameters - shape.expert_parameters) + root
    experts = layers * shape.expert_parameters
    return (
        -(-dense // layout.tensor_parallel_size),
        -(-experts // (layout.expert_parallel_size * layout.etp_size)),
    )


def activation_bytes_of_rank(
    shape: ModelShape, layout: MegatronLayout, *, tokens: int, compute_bytes: int, recomputes: bool
) -> int:
    """Bytes kept for the backward on the first stage, which has ``pp`` micro-batches under way (1F1B).

    For each layer and token as in ``estimate.activation_bytes_per_layer``, attention and MLP cut over ``tp``, norms
    only with sequence parallelism. With recomputation a layer keeps its input alone, and one at a time has the rest.
    """
    tensor = layout.tensor_parallel_size
    outside = tensor if layout.sequence_parallel else 1
    norms = 2 * shape.hidden_size * (FP32 + 2 * compute_bytes) // outside
    attention = compute_bytes * (3 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    per_layer = norms + (attention + 4 * compute_bytes * shape.mlp_width) // tensor
    layers = -(-shape.num_layers // layout.pipeline_parallel_size)
    under_way = layout.pipeline_parallel_size
    if recomputes:
        per_token = under_way * layers * shape.hidden_size * compute_bytes // outside + per_layer
    else:
        per_token = under_way * layers * per_layer
    return -(-tokens // layout.context_parallel_size) * per_token


def megatron_memory(
    shape: ModelShape,
    *,
    layout: MegatronLayout,
    data_parallel: int,
    distributed_optimizer: bool,
    compute_bytes: int,
    state_bytes: int,
    tokens: int,
    recomputes: bool,
    has_reference: bool,
) -> dict[str, int]:
    """Bytes on one rank at the peak of an update, by what holds them.

    Args:
        shape: of the model.
        layout: how it is cut.
        data_parallel: copies of the whole layout.
        distributed_optimizer: whether the copies share out the optimizer: dense parameters over ``dp x cp`` ranks,
            experts over the ranks that hold the same ones.
        compute_bytes: of one element in forward and backward.
        state_bytes: of the optimizer for one parameter; 8 for Adam's two moments.
        tokens: of the largest micro-batch.
        recomputes: whether the backward computes layers again.
        has_reference: whether a frozen copy is kept.
    """
    dense, experts = parameters_of_rank(shape, layout)
    ranks_of_stage = data_parallel * layout.tensor_parallel_size * layout.context_parallel_size
    shares, expert_shares = 1, 1
    if distributed_optimizer:
        shares = data_parallel * layout.context_parallel_size
        expert_shares = max(ranks_of_stage // (layout.expert_parallel_size * layout.etp_size), 1)
    each = state_bytes + (0 if compute_bytes == FP32 else FP32)
    own_tokens = -(-tokens // layout.context_parallel_size)
    return {
        "parameters": compute_bytes * (dense + experts),
        "gradients": FP32 * (dense + experts),
        "optimizer_state": each * (-(-dense // shares) + -(-experts // expert_shares)),
        "reference": compute_bytes * (dense + experts) if has_reference else 0,
        "activations": activation_bytes_of_rank(
            shape, layout, tokens=tokens, compute_bytes=compute_bytes, recomputes=recomputes
        ),
        # of all tokens at once, in fp32, and their gradient
        "logits": 2 * FP32 * own_tokens * -(-shape.vocab_size // layout.tensor_parallel_size),
    }


def megatron_memory_of_run(values: Mapping[str, Any], shape: ModelShape, **known: Any) -> dict[str, int]:
    """``megatron_memory`` of a configuration.

    Args:
        values: every key with its value or default, as ``validate`` returns them.
        shape: of the model.
        **known: the arguments of ``megatron_memory`` that a plan has at hand.
    """
    recompute = values.get("strategy.recompute")
    checkpoints = recompute is None and bool(values.get("algorithm.gradient_checkpointing"))
    return megatron_memory(
        shape,
        layout=megatron_layout(values),
        distributed_optimizer=bool(values.get("strategy.distributed_optimizer")),
        recomputes=recompute == "full" or checkpoints,
        **known,
    )


def pipeline_of_run(values: Mapping[str, Any], micro_batches: int | None) -> dict[str, Any]:
    """Stages, and the share of a mini-batch's time in which a stage waits for the others: its bubble.

    ``(pp - 1) / (m vpp + pp - 1)`` with ``m`` micro-batches in ``vpp`` chunks on each of ``pp`` stages, if all take
    equally long (Narayanan et al., arXiv:2104.04473). An interleaved pipeline fills ``m`` up to a multiple of ``pp``.

    Args:
        values: every key with its value or default, as ``validate`` returns them.
        micro_batches: of a mini-batch on one rank; None if not known.
    """
    layout = megatron_layout(values)
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_size
    found: dict[str, Any] = {"stages": stages, "chunks_per_stage": chunks}
    if micro_batches is None:
        return {**found, "micro_batches": None, "bubble": None}
    if chunks > 1:
        micro_batches += -micro_batches % stages
    bubble = (stages - 1) / (micro_batches * chunks + stages - 1)
    return {**found, "micro_batches": micro_batches, "bubble": round(bubble, 4)}
