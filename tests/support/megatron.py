"""Tiny models of every family, and a bare loop over megatron's own schedule, to hold against transformers."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lightning_rlhf.engines.megatron.backend import choose_backend
from lightning_rlhf.engines.megatron.config import MoEOptions
from lightning_rlhf.engines.megatron.export import export_parameters
from lightning_rlhf.engines.megatron.layout import MegatronLayout, check_layout, initialize_groups
from lightning_rlhf.engines.megatron.load import StateDictSource, disk_names, load_parameters
from lightning_rlhf.engines.megatron.model import build_model

VOCAB = 61
"""Odd, so that every tensor-parallel layout pads it."""

LENGTHS = ((7, 12, 11), (15, 4, 12), (23, 8), (32,))
"""Of the sequences of each micro-batch. Padded to multiples of four all micro-batches have 32 tokens."""

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "qwen2_moe", "glm4_moe", "mixtral")


@cache
def tiny(family: str, *, layers: int = 4) -> PreTrainedModel:
    """An fp32 model of some 100,000 parameters; biases and norms are not what they are initialised with."""
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": family == "qwen3_tied",
        "attn_implementation": "eager",
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(family))
        model: PreTrainedModel = {
            "llama": lambda: LlamaForCausalLM(LlamaConfig(**shared, rope_parameters=llama3)),
            "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**shared)),
            "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shared)),
            "qwen3_tied": lambda: Qwen3ForCausalLM(Qwen3Config(**shared)),
            "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **experts, norm_topk_prob=True)),
            "qwen3_moe_mixed": lambda: Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**shared, **experts, norm_topk_prob=False, mlp_only_layers=[1])
            ),
            "qwen2_moe": lambda: Qwen2MoeForCausalLM(
                Qwen2MoeConfig(**shared, **experts, shared_expert_intermediate_size=48)
            ),
            "glm4_moe": lambda: Glm4MoeForCausalLM(
                Glm4MoeConfig(
                    **shared,
                    n_routed_experts=4,
                    num_experts_per_tok=2,
                    moe_intermediate_size=32,
                    n_shared_experts=2,
                    routed_scaling_factor=1.5,
                    attention_bias=True,
                    use_qk_norm=True,
                    num_mtp_layers=0,
                )
            ),
            "mixtral": lambda: MixtralForCausalLM(
                MixtralConfig(**shared, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
            ),
        }[family]().float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(0.1 * torch.randn_like(buffer))
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    torch.nn.init.normal_(parameter, std=0.1)  # some families start it at zero, where all are equal
    return model.train()


@dataclass(frozen=True)
class Sequences:
    """Micro-batches of sequences, and a weight for each token that is predicted."""

    tokens: list[list[Tensor]]
    weights: list[list[Tensor]]


@cache
def sequences() -> Sequences:
    """Random ones, of one token more than ``LENGTHS`` so that each has a next."""
    generator = torch.Generator().manual_seed(5)
    tokens = [[torch.randint(0, VOCAB, (n + 1,), generator=generator) for n in pack] for pack in LENGTHS]
    weights = [[torch.rand(n, generator=generator) / 50 for n in pack] for pack in LENGTHS]
    return Sequences(tokens, weights)


@dataclass(frozen=True)
class Reference:
    """What transformers computes, sequence after sequence, by the names on disk."""

    loss: float
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def reference(family: str, *, value_head: bool = False) -> Reference:
    """Loss and gradients of the whole batch in one process. Computed once; call it before the ranks are forked."""
    return _reference(family, value_head)


@cache
def _reference(family: str, value_head: bool) -> Reference:
    model = tiny(family)
    model.zero_grad()
    head = value_weight() if value_head else None
    total = 0.0
    data = sequences()
    for pack, pack_weights in zip(data.tokens, data.weights, strict=True):
        for tokens, weights in zip(pack, pack_weights, strict=True):
            if head is None:
                losses = F.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:], reduction="none")
            else:
                states = model.base_model(tokens[None, :-1]).last_hidden_state[0]
                losses = (F.linear(states, head).squeeze(-1) - target(tokens[1:])) ** 2
            loss = (losses * weights).sum()
            loss.backward()
            total += loss.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    stored = dict(model.state_dict())
    if head is not None:
        assert head.grad is not None
        gradients["score.weight"] = head.grad.clone()
        stored = {name: tensor for name, tensor in stored.items() if name != "lm_head.weight"}
        stored["score.weight"] = head.detach()
    if model.config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    model.zero_grad()
    return Reference(total, on_disk(model, stored), on_disk(model, gradients))


def on_disk(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    score = tensors.pop("score.weight", None)
    renamed = {name: tensor.detach().clone() for name, tensor in disk_names(model, tensors).items()}
    return renamed if score is None else {**renamed, "score.weight": score}


def value_weight() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (0.1 * torch.randn(1, 64, generator=generator)).requires_grad_()


def target(tokens: Tensor) -> Tensor:
    return tokens / VOCAB - 0.5


def build(
    family: str, layout: MegatronLayout, *, value_head: bool = False, moe: MoEOptions | None = None, **options: Any
) -> list[nn.Module]:
    """The model of this rank, with the family's weights. The caller stands in ``backend.active()``."""
    hf_config = tiny(family).config
    backend = choose_backend("cpu")
    check_layout(layout, hf_config, dist.get_world_size())
    initialize_groups(layout)
    chunks = build_model(hf_config, layout=layout, backend=backend, value_head=value_head, moe=moe, **options)
    load_parameters(chunks, StateDictSource(reference(family, value_head=value_head).weights), hf_config=hf_config)
    return chunks


@dataclass(frozen=True)
class Difference:
    """From the reference: largest absolute difference of any element, and where it is."""

    loss: float
    gradient: float
    worst: str


def compare(
    family: str,
    layout: MegatronLayout,
    *,
    value_head: bool = False,
    moe: MoEOptions | None = None,
    broken: Any = None,
    **options: Any,
) -> Difference:
    """Export the weights (bit for bit), do one forward and backward with megatron's schedule, export the gradients.

    Args:
        family: of the model.
        layout: of the ranks.
        value_head: a squared error of values in place of the cross entropy.
        moe: options of the experts.
        broken: a function of the chunks that spoils something, for negative controls.
        **options: of ``build_model``.
    """
    expected = reference(family, value_head=value_head)
    with choose_backend("cpu").active():
        chunks = build(family, layout, value_head=value_head, moe=moe, **options)
        hf_config = tiny(family).config
        exported = {name: t.clone() for name, t in export_parameters(chunks, hf_config=hf_config)}
        assert exported.keys() == expected.weights.keys(), exported.keys() ^ expected.weights.keys()
        for name, tensor in exported.items():
            assert torch.equal(tensor, expected.weights[name]), name
        if broken is not None:
            broken(chunks)
        loss = forward_backward(chunks, layout, value_head=value_head)
        gradients = export_parameters(chunks, hf_config=hf_config, tensor_of=lambda p: p.main_grad)
        differences = {name: (g - expected.gradients[name]).abs().max().item() for name, g in gradients}
    assert differences.keys() == expected.gradients.keys(), differences.keys() ^ expected.gradients.keys()
    worst = max(differences, key=lambda name: differences[name])
    return Difference(abs(loss - expected.loss), differences[worst], worst)


def forward_backward(chunks: list[nn.Module], layout: MegatronLayout, *, value_head: bool = False) -> float:
    """Leave the whole batch's gradient in every ``main_grad``; returns the loss."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config: Any = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    data = sequences()
    share = slice(parallel_state.get_data_parallel_rank(), None, parallel_state.get_data_parallel_world_size())
    micro_batches = [
        pack_sequences(tokens, weights, layout, value_head=value_head)
        for tokens, weights in zip(data.tokens[share], data.weights[share], strict=True)
    ]
    counts = torch.tensor(sum(one.tokens.shape[1] for one in micro_batches))
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    losses = get_forward_backward_func()(
        forward_step_func=lambda iterator, chunk: _step(next(iterator), chunk, int(counts), value_head),
        data_iterator=[iter(micro_batches) for _ in wrapped] if len(wrapped) > 1 else iter(micro_batches),
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].tokens.shape[1] * layout.context_parallel_size,
        micro_batch_size=1,
        forward_only=False,
    )
    total = torch.stack([one["loss"] for one in losses]).sum() if losses else torch.zeros(())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    stages = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(total, parallel_state.get_pipeline_model_parallel_last_rank(), group=stages)
    return float(total)


@dataclass(frozen=True)
class Packed:
    """This context-parallel rank's part of one micro-batch, ``[1, tokens]`` each."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    params: Any


def pack_sequences(
    tokens: list[Tensor], weights: list[Tensor], layout: MegatronLayout, *, value_head: bool = False
) -> Packed:
    """Pad each sequence on the right, cut it into zigzag, one after another."""
    from megatron.core.packed_seq_params import PackedSeqParams

    padded_lengths = padded([len(one) - 1 for one in tokens], layout)

    def mine(values: list[Tensor]) -> Tensor:
        return zigzag(values, layout)[None]

    starts = torch.tensor([0, *itertools.accumulate(padded_lengths)], dtype=torch.int32)
    longest = max(padded_lengths)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return Packed(mine([one[:-1] for one in tokens]), mine([one[1:] for one in tokens]), mine(weights), params)


def padded(lengths: list[int], layout: MegatronLayout) -> list[int]:
    unit = math.lcm(4, 2 * layout.context_parallel_size * layout.tensor_parallel_size)
    return [math.ceil(length / unit) * unit for length in lengths]


def zigzag(values: list[Tensor], layout: MegatronLayout, *, fill: float = 0) -> Tensor:
    """This context-parallel rank's rows of sequences of rows, padded with ``fill``."""
    from megatron.core import parallel_state

    cp, rank = layout.context_parallel_size, parallel_state.get_context_parallel_rank()
    parts = []
    for one, length in zip(values, padded([len(one) for one in values], layout), strict=True):
        padding = one.new_full((length - len(one), *one.shape[1:]), fill)
        chunks = torch.cat([one, padding]).chunk(2 * cp)
        parts += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.cat(parts)


def _step(batch: Packed, chunk: Any, total: int, value_head: bool) -> tuple[Tensor, Any]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    output = chunk(batch.tokens, torch.zeros_like(batch.tokens), None, packed_seq_params=batch.params)

    def loss_function(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if value_head:
            losses = (output[0].squeeze(-1) - target(batch.labels[0])) ** 2
        else:
            logits = gather_from_tensor_model_parallel_region(output[0].float())[:, :VOCAB]
            losses = F.cross_entropy(logits, batch.labels[0], reduction="none")
        loss = (losses * batch.weights[0]).sum()
        num_tokens = torch.tensor(batch.tokens.numel(), dtype=torch.int)
        return loss * total, num_tokens, {"loss": loss.detach()}

    return output, loss_function
