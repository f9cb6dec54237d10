"""What a run takes, in bytes and counts, from sizes alone: formulas without a model, a configuration or a process.

``N`` is a model's parameters, ``s`` the ranks that share one copy of them, ``r`` the copies, ``b`` the bytes of the
compute dtype. Masters, gradients and moments are fp32. Estimates leave out the allocator's slack, the framework, and
buffers that live for one operation. Under an adapter its parameters alone have gradients and optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        num_parameters: of the model, a weight that two modules share counted once.
        layer_parameters: of its largest decoder layer.
        num_layers: decoder layers.
        hidden_size: of the residual stream.
        mlp_width: of the hidden layer of one token's MLP; of all experts together that a token goes through.
        num_heads: of the queries.
        num_kv_heads: of keys and values.
        head_dim: of one head.
        vocab_size: of the head.
        expert_parameters: of the experts of its largest decoder layer, among ``layer_parameters``.
        experts_per_token: that a token goes through; 0 for a dense model.
        adapter_parameters: of a low-rank adapter beside those of the model, which are frozen then; 0 for none.
    """

    num_parameters: int
    layer_parameters: int
    num_layers: int
    hidden_size: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    expert_parameters: int = 0
    experts_per_token: int = 0
    adapter_parameters: int = 0

    @property
    def root_parameters(self) -> int:
        """Embedding, final norm and head."""
        return self.num_parameters - self.num_layers * self.layer_parameters

    @property
    def trained_parameters(self) -> int:
        """Those with a gradient: the adapter's, or all."""
        return self.adapter_parameters or self.num_parameters


def value_model(shape: ModelShape) -> ModelShape:
    """The critic that starts from this model: its head of ``V`` rows, if it is not the embedding, gives way to one."""
    head = shape.vocab_size * shape.hidden_size
    untied = shape.root_parameters >= 2 * head
    parameters = shape.num_parameters - (head if untied else 0) + shape.hidden_size
    return replace(shape, num_parameters=parameters, adapter_parameters=0)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the processes share the model.

    Attributes:
        shards: ranks that share one copy of parameters, gradients and optimizer state.
        replicas: copies of that group.
        sequence_shards: ranks that share each sequence's activations.
        reshard_after_forward: whether layers are gathered again for the backward.
    """

    shards: int = 1
    replicas: int = 1
    sequence_shards: int = 1
    reshard_after_forward: bool = True


def activation_bytes_per_layer(shape: ModelShape, *, compute_bytes: int) -> int:
    """Bytes that one layer keeps for the backward of one token.

    Each of two norms keeps its input in fp32, what it has normalised, and its output, which the next product reads:
    ``2 h (4 + 2 b)``. Attention keeps queries, keys, values, its output, and that again as the input of the output
    projection: ``b (3 heads + 2 kv_heads) head_dim``. The gated MLP keeps gate, activated gate, up, and their product:
    ``4 b w``. Scores are never kept.
    """
    norms = 2 * shape.hidden_size * (FP32 + 2 * compute_bytes)
    attention = compute_bytes * (3 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return norms + attention + 4 * compute_bytes * shape.mlp_width


def activation_bytes(
    shape: ModelShape, *, tokens: int, compute_bytes: int, gradient_checkpointing: bool, sequence_shards: int = 1
) -> int:
    """Bytes kept for the backward of one micro-batch on one rank.

    Args:
        shape: of the model.
        tokens: of the micro-batch, before they are cut over ``sequence_shards``.
        compute_bytes: of one element.
        gradient_checkpointing: each layer keeps its input alone; one at a time has the rest.
        sequence_shards: ranks that hold a slice each.
    """
    per_layer = activation_bytes_per_layer(shape, compute_bytes=compute_bytes)
    if gradient_checkpointing:
        per_token = shape.num_layers * shape.hidden_size * compute_bytes + per_layer
    else:
        per_token = shape.num_layers * per_layer
    return -(-tokens // sequence_shards) * per_token


def logits_bytes(shape: ModelShape, *, tokens: int, chunk_size: int) -> int:
    """Bytes of one chunk's logits and of their gradient, both fp32: ``8 min(tokens, chunk) V``."""
    return 2 * FP32 * min(tokens, chunk_size) * shape.vocab_size


def kv_cache_bytes(shape: ModelShape, *, tokens: int, element_bytes: int) -> int:
    """Bytes of the keys and values of so many tokens: ``2 b layers kv_heads head_dim tokens``."""
    return 2 * element_bytes * shape.num_layers * shape.num_kv_heads * shape.head_dim * tokens


def training_memory(
    shape: ModelShape,
    *,
    layout: Layout,
    compute_bytes: int,
    state_bytes: int,
    tokens: int,
    scored_tokens: int,
    chunk_size: int,
    accumulates: bool,
    gradient_checkpointing: bool,
    has_reference: bool,
) -> dict[str, int]:
    """Bytes on one rank at the peak of an update, by what holds them.

    Gradients are reduced with the last micro-batch: until then each rank adds up whole ones, ``4 N``, and only a
    mini-batch of one micro-batch gets by with ``4 N / s``.

    Args:
        shape: of the model.
        layout: how it is shared.
        compute_bytes: of one element in forward and backward.
        state_bytes: of the optimizer for one parameter; 8 for Adam's two moments.
        tokens: of the largest micro-batch.
        scored_tokens: those of them that go through the head.
        chunk_size: tokens whose logits are held at a time.
        accumulates: whether a mini-batch has several micro-batches.
        gradient_checkpointing: see ``activation_bytes``.
        has_reference: whether a frozen copy is kept.
    """
    trained = shape.trained_parameters
    trained_shard = -(-trained // layout.shards)
    shard = -(-(shape.num_parameters + shape.adapter_parameters) // layout.shards)
    gathered = 0
    if layout.shards > 1:
        # a layer in use and the next on its way; all of them if they stay
        layers = 2 if layout.reshard_after_forward else shape.num_layers
        gathered = compute_bytes * (layers * shape.layer_parameters + shape.root_parameters)
    elif compute_bytes != FP32:
        gathered = compute_bytes * shape.num_parameters  # the casts that the backward reads
    return {
        "parameters": FP32 * shard,
        "gradients": FP32 * (trained if accumulates else trained_shard),
        "optimizer_state": state_bytes * trained_shard,
        "reference": FP32 * shard if has_reference else 0,
        "gathered_parameters": gathered,
        "activations": activation_bytes(
            shape,
            tokens=tokens,
            compute_bytes=compute_bytes,
            gradient_checkpointing=gradient_checkpointing,
            sequence_shards=layout.sequence_shards,
        ),
        "logits_chunk": logits_bytes(shape, tokens=-(-scored_tokens // layout.sequence_shards), chunk_size=chunk_size),
    }


def communication(
    shape: ModelShape,
    *,
    layout: Layout,
    compute_bytes: int,
    training_micro_batches: int,
    inference_micro_batches: int,
    optimizer_steps: int,
    pushes: int,
) -> dict[str, int]:
    """Bytes that one rank receives in one RL step, by collective, with ring algorithms.

    Gathering ``S`` bytes over ``n`` ranks brings each ``S (n - 1) / n``, and so does a reduce-scatter; an all-reduce
    takes twice that. Parameters are gathered for each micro-batch's forward, and again for its backward where they have
    been freed (the root always is). Gradients are reduced once per optimizer step, in fp32, over the shards and then
    over the replicas. A push gathers every fp32 parameter.

    Args:
        shape: of the model.
        layout: how it is shared.
        compute_bytes: of one element in forward and backward.
        training_micro_batches: forward-backwards of an RL step on one rank.
        inference_micro_batches: forwards without a backward, of the actor and a reference alike.
        optimizer_steps: of an RL step.
        pushes: of weights to the rollout engine, in an RL step.
    """
    n, s, r = shape.num_parameters + shape.adapter_parameters, layout.shards, layout.replicas
    trained = shape.trained_parameters
    again = n if layout.reshard_after_forward else shape.root_parameters
    gathered = training_micro_batches * (n + again) + inference_micro_batches * n
    shard_bytes = -(-FP32 * trained // s)
    return {
        "all_gather": compute_bytes * gathered * (s - 1) // s,
        "reduce_scatter": optimizer_steps * FP32 * trained * (s - 1) // s,
        "all_reduce": optimizer_steps * 2 * shard_bytes * (r - 1) // r,
        "weight_push_all_gather": pushes * FP32 * n * (s - 1) // s,
    }


def optimizer_state_bytes(path: str, *, momentum: float = 0.0) -> int | None:
    """Bytes of optimizer state for one parameter; None for an optimizer that is not known here.

    Args:
        path: import path of the optimizer's class.
        momentum: of SGD.
    """
    name = path.rpartition(".")[2]
    if name in ("Adam", "AdamW", "NAdam", "RAdam"):
        return 2 * FP32
    if name == "SGD":
        return FP32 if momentum else 0
    return None
