"""One table of names: what each of megatron's parameters is called and how it is cut, against Hugging Face's names.

Megatron's names here are global: layers are counted over all pipeline stages and chunks, experts over all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

from torch import nn

from lightning_rlhf.engines.megatron.families import ModelShape, MoEShape
from lightning_rlhf.engines.megatron.value import ValueHead

Kind = Literal["plain", "vocab", "row", "qkv", "gate_up"]
"""How ranks share a parameter: each has all, or cut by tokens of the vocabulary, by inputs, by outputs of a projection
in which each key-value head's queries, key and value stand together, or by outputs of gate and up in one."""


@dataclass(frozen=True)
class Rule:
    """One line of the table."""

    pattern: str
    """Of the whole global megatron name; groups ``layer`` and ``expert`` fill the names below."""
    kind: Kind
    hf_names: tuple[str, ...]
    is_expert: bool = False
    """Whether the expert ranks cut it, not the tensor-parallel ones."""


@dataclass(frozen=True)
class Piece:
    """A range of one Hugging Face tensor that a rank holds; a rank's pieces stand one after another along ``dim``."""

    hf_index: int
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Parameter:
    """A parameter's place in the table."""

    kind: Kind
    hf_names: tuple[str, ...]
    is_expert: bool


@lru_cache(maxsize=16)
def rules(shape: ModelShape) -> tuple[Rule, ...]:
    """The table for one model, in the spellings of the local and of the Transformer Engine spec."""
    layer, hf = _LAYER_PATTERN, _HF_LAYER
    attention, mlp = layer + r"self_attention\.", layer + r"mlp\."
    table = [
        Rule(r"embedding\.word_embeddings\.weight", "vocab", (EMBEDDING,)),
        Rule(r"output_layer\.weight", "vocab", (EMBEDDING if shape.tied else HEAD,)),
        Rule(r"value_head\.weight", "plain", (VALUE_HEAD,)),
        Rule(r"decoder\.final_layernorm\.weight", "plain", ("model.norm.weight",)),
        Rule(layer + r"input_layernorm\.weight", "plain", (hf + "input_layernorm.weight",)),
        Rule(attention + r"linear_qkv\.layer_norm_weight", "plain", (hf + "input_layernorm.weight",)),
        Rule(attention + r"linear_qkv\.weight", "qkv", tuple(hf + f"self_attn.{one}_proj.weight" for one in "qkv")),
        Rule(attention + r"linear_proj\.weight", "row", (hf + "self_attn.o_proj.weight",)),
        Rule(layer + r"pre_mlp_layernorm\.weight", "plain", (hf + "post_attention_layernorm.weight",)),
        Rule(mlp + r"linear_fc1\.layer_norm_weight", "plain", (hf + "post_attention_layernorm.weight",)),
        Rule(mlp + r"linear_fc1\.weight", "gate_up", (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight")),
        Rule(mlp + r"linear_fc2\.weight", "row", (hf + "mlp.down_proj.weight",)),
    ]
    if shape.qkv_bias:
        table.append(
            Rule(attention + r"linear_qkv\.bias", "qkv", tuple(hf + f"self_attn.{one}_proj.bias" for one in "qkv"))
        )
    if shape.qk_norm:
        table += [
            Rule(attention + rf"{one}_layernorm\.weight", "plain", (hf + f"self_attn.{one}_norm.weight",))
            for one in "qk"
        ]
    if shape.moe is not None:
        table += _expert_rules(shape.moe)
    return tuple(table)


def _expert_rules(moe: MoEShape) -> list[Rule]:
    mlp, hf = _LAYER_PATTERN + r"mlp\.", _HF_LAYER
    gate, up, down = (hf + moe.hf_expert.format("{expert}", part) for part in moe.hf_expert_parts)
    sequential, grouped = mlp + r"experts\.local_experts\.(?P<expert>\d+)\.", mlp + r"experts\."
    table = [
        Rule(mlp + r"router\.weight", "plain", (hf + moe.hf_router,)),
        Rule(sequential + r"linear_fc1\.weight", "gate_up", (gate, up), is_expert=True),
        Rule(sequential + r"linear_fc2\.weight", "row", (down,), is_expert=True),
        Rule(grouped + r"linear_fc1\.weight(?P<expert>\d+)", "gate_up", (gate, up), is_expert=True),
        Rule(grouped + r"linear_fc2\.weight(?P<expert>\d+)", "row", (down,), is_expert=True),
    ]
    if moe.hf_expert_bias is not None:
        table.append(Rule(mlp + r"router\.expert_bias", "plain", (hf + moe.hf_expert_bias,)))
    if moe.shared_ffn_size is not None:
        gate, up, down = (f"{hf}{moe.hf_shared_expert}.{part}.weight" for part in moe.hf_expert_parts)
        table.append(Rule(mlp + r"shared_experts\.linear_fc1\.weight", "gate_up", (gate, up)))
        table.append(Rule(mlp + r"shared_experts\.linear_fc2\.weight", "row", (down,)))
    if moe.hf_shared_gate is not None:
        table.append(Rule(mlp + r"shared_experts\.gate_weight", "plain", (hf + moe.hf_shared_gate,)))
    return table


_LAYER_PATTERN, _HF_LAYER = r"decoder\.layers\.(?P<layer>\d+)\.", "model.layers.{layer}."
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"


def look_up(name: str, shape: ModelShape) -> Parameter:
    """Find a parameter in the table.

    Args:
        name: global megatron name.
        shape: of the model.

    Raises:
        KeyError: if no rule knows it: the model was built with a module that the table lacks.
    """
    for rule in rules(shape):
        match = re.fullmatch(rule.pattern, name)
        if match:
            names = tuple(one.format(**match.groupdict()) for one in rule.hf_names)
            return Parameter(rule.kind, names, rule.is_expert)
    raise KeyError(f"No rule in the table of names knows megatron's parameter {name!r} of {shape.model_type}.")


def is_known_hf_name(hf_name: str, shape: ModelShape) -> bool:
    """Whether some rule reads this tensor of a checkpoint."""
    return any(re.fullmatch(pattern, hf_name) for pattern in _hf_patterns(shape))


@lru_cache(maxsize=16)
def _hf_patterns(shape: ModelShape) -> tuple[str, ...]:
    def pattern(template: str) -> str:
        return r"\d+".join(re.escape(text) for text in re.split(r"\{(?:layer|expert)\}", template))

    return tuple(pattern(template) for rule in rules(shape) for template in rule.hf_names)


def local_parameters(chunks: Sequence[nn.Module], *, num_local_experts: int, expert_rank: int) -> dict[str, Any]:
    """This rank's parameters by their global megatron names, and the buffers that checkpoints hold.

    Args:
        chunks: the unwrapped model chunks.
        num_local_experts: experts on each rank.
        expert_rank: this rank's place among those that share out the experts.
    """
    found: dict[str, Any] = {}
    for chunk in chunks:
        any_chunk: Any = chunk
        layers = [layer.layer_number - 1 for layer in any_chunk.decoder.layers]
        has_value_head = any_chunk.post_process and isinstance(any_chunk.output_layer, ValueHead)
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))
        for name, parameter in (*chunk.named_parameters(), *buffers):
            if has_value_head and name == "output_layer.weight":
                name = "value_head.weight"
            layer = _LAYER.match(name)
            if layer:
                name = f"{layer[1]}{layers[int(layer[2])]}{name[layer.end() :]}"
            found[with_expert(name, lambda expert: expert + expert_rank * num_local_experts)] = parameter
    return found


_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(?=\.)")
_EXPERT = re.compile(r"(experts\.local_experts\.|experts\.linear_fc[12]\.weight)(\d+)")


def with_expert(name: str, change: Any) -> str:
    """The name with its expert's number changed by a function; other names as they are."""
    return _EXPERT.sub(lambda match: f"{match[1]}{change(int(match[2]))}", name)


def pieces(kind: Kind, local_shape: Sequence[int], shape: ModelShape, *, rank: int) -> list[Piece]:
    """Which ranges of the Hugging Face tensors a rank holds.

    Args:
        kind: how the parameter is cut.
        local_shape: of the rank's parameter.
        shape: of the model.
        rank: one of those that it is cut over.

    Returns:
        The pieces in the order in which they stand in the parameter. Rows beyond the vocabulary are in none.
    """
    if kind == "plain":
        return [Piece(0, 0, 0, local_shape[0])]
    if kind == "row":
        return [Piece(0, 1, rank * local_shape[1], (rank + 1) * local_shape[1])]
    if kind == "gate_up":
        half = local_shape[0] // 2
        return [Piece(index, 0, rank * half, (rank + 1) * half) for index in (0, 1)]
    if kind == "vocab":
        rows = local_shape[0]
        stop = min((rank + 1) * rows, shape.vocab_size)
        return [Piece(0, 0, rank * rows, stop)] if stop > rank * rows else []
    return _qkv_pieces(local_shape[0], shape, rank=rank)


def _qkv_pieces(rows: int, shape: ModelShape, *, rank: int) -> list[Piece]:
    """Cut ``q q k v | q q k v | ...`` by rows; where ranks outnumber key-value heads a cut falls inside a group."""
    first, last = rank * rows, (rank + 1) * rows
    queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
    found = []
    place = 0
    for group in range(shape.num_kv_heads):
        for index, width in enumerate((queries, shape.head_dim, shape.head_dim)):
            start, stop = max(first, place), min(last, place + width)
            if start < stop:
                shift = group * width - place
                found.append(Piece(index, 0, start + shift, stop + shift))
            place += width
    return found


def hf_shapes(kind: Kind, local_shape: Sequence[int], shape: ModelShape, *, size: int) -> list[tuple[int, ...]]:
    """The shapes of the Hugging Face tensors that a parameter is made of, from one rank's share."""
    rest = tuple(local_shape[1:])
    if kind == "plain":
        return [tuple(local_shape)]
    if kind == "row":
        return [(local_shape[0], local_shape[1] * size, *local_shape[2:])]
    if kind == "gate_up":
        return [(local_shape[0] // 2 * size, *rest)] * 2
    if kind == "vocab":
        return [(shape.vocab_size, *rest)]
    widths = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    return [(heads * shape.head_dim, *rest) for heads in widths]


def num_elements(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Of each shape."""
    return [prod(one) for one in shapes]
