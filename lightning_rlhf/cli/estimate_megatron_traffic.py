"""What a rank of ``megatron_rl`` receives in an RL step, in bytes, by the axis that it comes over.

``t``, ``c``, ``p``, ``e`` are the sizes of tensor, context, pipeline and expert parallelism (``e`` with the cut of each
expert), ``b`` the bytes of the compute dtype, ``h`` the hidden size; ``T`` tokens are a rank's rows, ``T / c`` its own
part of them. Rings: gathering ``S`` bytes over ``n`` ranks brings each ``S (n - 1) / n``, a reduce-scatter as much, an
all-reduce twice that. Router gradients, log-sum-exps of the vocabulary's parts, and padding are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_rlhf.cli.estimate import FP32, ModelShape
from lightning_rlhf.cli.estimate_megatron import parameters_of_rank
from lightning_rlhf.cli.layout_checks import megatron_layout
from lightning_rlhf.engines.megatron.layout import MegatronLayout


def activation_traffic(
    shape: ModelShape, layout: MegatronLayout, *, compute_bytes: int, trained: int, inferred: int, recomputes: bool
) -> dict[str, int]:
    """Bytes of activations and their gradients.

    - ``tensor``: of each layer attention and MLP are all-reduced, in the forward and again in the backward: a token
      and pass have ``4 b h (t - 1) / t``. Sequence parallelism splits each into a gather and a scatter of as many
      bytes, and gathers both inputs once more in the backward.
    - ``context``: keys and values go round the ring in the forward, ``c - 1`` steps, and in the backward, with their
      fp32 gradients, which make ``c``.
    - ``expert``: a token's hidden state goes to each of its experts and back, in the forward as in the backward.
    - ``pipeline``: hidden states from the stage before, gradients from the one behind, for each chunk; of the first and
      last stage it is less.

    Args:
        shape: of the model.
        layout: how it is cut.
        compute_bytes: of one element in forward and backward.
        trained: tokens of a data-parallel rank that go forward and backward in an RL step.
        inferred: those that go forward alone.
        recomputes: whether the backward computes layers again.
    """
    t, c, p = layout.tensor_parallel_size, layout.context_parallel_size, layout.pipeline_parallel_size
    e = layout.expert_parallel_size * layout.etp_size
    layers = -(-shape.num_layers // p)
    hidden = compute_bytes * shape.hidden_size
    own_trained, own_inferred = -(-trained // c), -(-inferred // c)
    outside = t if layout.sequence_parallel else 1  # ranks that hold a slice each between attention and MLP
    forwards = own_trained * (2 if recomputes else 1) + own_inferred
    extra = 2 if layout.sequence_parallel else 0
    keys_values = 2 * shape.num_kv_heads * shape.head_dim // t
    ring = (c - 1) * compute_bytes * (forwards + own_trained) + (c if c > 1 else 0) * FP32 * own_trained
    routed = 2 * shape.experts_per_token * (forwards + own_trained) // outside
    directions = own_trained * min(p - 1, 2) + own_inferred * min(p - 1, 1)
    return {
        "tensor": layers * hidden * (4 * forwards + (4 + extra) * own_trained) * (t - 1) // t,
        "context": layers * keys_values * ring,
        "expert": layers * hidden * routed * (e - 1) // e,
        "pipeline": layout.virtual_pipeline_size * hidden * directions // outside,
    }


def gradient_traffic(
    shape: ModelShape, layout: MegatronLayout, *, data_parallel: int, distributed_optimizer: bool, compute_bytes: int
) -> int:
    """Bytes of one optimizer step: fp32 gradients summed over the ranks that hold the same parameters.

    Those are ``dp x c`` for dense ones, for experts the ranks that hold the same. A distributed optimizer scatters the
    sums and gathers the updated parameters; else each rank gets all sums.
    """
    dense, experts = parameters_of_rank(shape, layout)
    copies = data_parallel * layout.context_parallel_size
    same_experts = max(
        copies * layout.tensor_parallel_size // (layout.expert_parallel_size * layout.etp_size),
        1,
    )
    each = FP32 + compute_bytes if distributed_optimizer else 2 * FP32
    return each * (dense * (copies - 1) // copies + experts * (same_experts - 1) // same_experts)


def push_traffic(shape: ModelShape, layout: MegatronLayout, *, compute_bytes: int) -> int:
    """Bytes of one push of weights: every rank gets the whole model, in the compute dtype, less what it holds."""
    return compute_bytes * max(shape.num_parameters - sum(parameters_of_rank(shape, layout)), 0)


def megatron_communication(
    values: Mapping[str, Any],
    shape: ModelShape,
    *,
    data_parallel: int,
    compute_bytes: int,
    trained: int,
    inferred: int,
    optimizer_steps: int,
    pushes: int,
) -> dict[str, int]:
    """Bytes that one rank receives in one RL step, by axis.

    Args:
        values: every key with its value or default, as ``validate`` returns them.
        shape: of the model.
        data_parallel: copies of the whole layout.
        compute_bytes: of one element in forward and backward.
        trained: see ``activation_traffic``.
        inferred: likewise.
        optimizer_steps: of an RL step.
        pushes: of weights to the rollout engine, in an RL step.
    """
    layout = megatron_layout(values)
    recompute = values.get("strategy.recompute")
    checkpoints = recompute is None and bool(values.get("algorithm.gradient_checkpointing"))
    activations = activation_traffic(
        shape,
        layout,
        compute_bytes=compute_bytes,
        trained=trained,
        inferred=inferred,
        recomputes=recompute == "full" or checkpoints,
    )
    gradients = gradient_traffic(
        shape,
        layout,
        data_parallel=data_parallel,
        distributed_optimizer=bool(values.get("strategy.distributed_optimizer")),
        compute_bytes=compute_bytes,
    )
    pushed = push_traffic(shape, layout, compute_bytes=compute_bytes)
    return {**activations, "gradients": optimizer_steps * gradients, "weight_push": pushes * pushed}
