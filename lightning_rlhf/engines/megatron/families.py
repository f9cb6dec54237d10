"""What a Hugging Face config says about a model, in one set of words.

Families and features that megatron-core would not compute exactly are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class MoEShape:
    """The mixture-of-experts part of a model."""

    num_experts: int
    experts_per_token: int
    ffn_size: int
    """Width of one expert."""
    renormalize: bool
    """Whether the chosen experts' weights are scaled to sum to one."""
    aux_loss_coef: float
    """Of the load-balancing loss that the model asks for in training; 0 for none."""
    is_moe_layer: tuple[bool, ...]
    """Per layer: experts, or one dense MLP."""
    hf_router: str
    """The router's name below ``model.layers.N.``."""
    hf_expert: str
    """An expert's names below ``model.layers.N.``: ``{0}`` is its number, ``{1}`` one of ``hf_expert_parts``."""
    hf_expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """What the family calls gate, up and down projection."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What the router makes of its logits."""
    scale: float = 1.0
    """Of the chosen experts' weights, after they are renormalised."""
    hf_expert_bias: str | None = None
    """A buffer that is added to scores when experts are chosen, and not when they are weighed; None: there is none."""
    shared_ffn_size: int | None = None
    """Width of an expert that sees every token; None: there is none."""
    hf_shared_expert: str = ""
    """Its name below ``model.layers.N.``."""
    hf_shared_gate: str | None = None
    """What scales it token by token; None: nothing does."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes and features of a decoder that megatron-core builds exactly."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of a dense MLP."""
    vocab_size: int
    tied: bool
    """Whether the head is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    """Whether each head's query and key are normalised."""
    norm_eps: float
    initializer_range: float
    max_length: int
    rotated: float
    """The share of each head that the rotary embedding turns."""
    extra_layers: int
    """Layers of a checkpoint beyond ``num_layers`` that transformers leaves out as well (multi-token prediction)."""
    moe: MoEShape | None


def model_shape(hf_config: Any) -> ModelShape:
    """Read a Hugging Face config.

    Args:
        hf_config: of one of the families in ``FAMILIES``.

    Raises:
        ValueError: for another family, or for a feature that this back end does not compute exactly; the message names
            it.
    """
    model_type = str(hf_config.model_type)
    if model_type not in FAMILIES:
        raise ValueError(
            f"The megatron back end does not know model_type {model_type!r}; it knows {', '.join(sorted(FAMILIES))}. "
            f"Train this model with strategy 'fsdp2_rl'."
        )
    qkv_bias, qk_norm, read_moe = FAMILIES[model_type](hf_config)
    _refuse_unknown_features(hf_config)
    num_heads = int(hf_config.num_attention_heads)
    head_dim = vars(hf_config).get("head_dim") or hf_config.hidden_size // num_heads
    return ModelShape(
        model_type=model_type,
        num_layers=int(hf_config.num_hidden_layers),
        hidden_size=int(hf_config.hidden_size),
        num_heads=num_heads,
        num_kv_heads=int(hf_config.num_key_value_heads or num_heads),
        head_dim=int(head_dim),
        ffn_size=int(hf_config.intermediate_size),
        vocab_size=int(hf_config.vocab_size),
        tied=bool(hf_config.tie_word_embeddings),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        norm_eps=float(hf_config.rms_norm_eps),
        initializer_range=float(hf_config.initializer_range),
        max_length=int(hf_config.max_position_embeddings),
        rotated=float(hf_config.rope_parameters.get("partial_rotary_factor", 1.0)),
        extra_layers=int(hf_config.num_mtp_layers) if model_type == "glm4_moe" else 0,
        moe=read_moe,
    )


def inverse_frequencies(hf_config: Any) -> Tensor:
    """``[head_dim * rotated / 2]`` fp32: the rotary frequencies, from transformers' own code.

    Raises:
        ValueError: for a scaling that depends on the length of the batch, or that also scales the scores.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = hf_config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in EXACT_ROPE:
        raise ValueError(
            f"{hf_config.model_type}: rotary scaling {kind!r} is not computed exactly by the megatron back end; it "
            f"knows {', '.join(EXACT_ROPE)}. Train this model with strategy 'fsdp2_rl', or on its original context "
            f"length without the scaling."
        )
    if kind == "default":
        shape = model_shape(hf_config)
        turned = int(shape.head_dim * shape.rotated)
        powers = torch.arange(0, turned, 2, dtype=torch.int64).float() / turned
        return 1.0 / (float(rope["rope_theta"]) ** powers)
    frequencies: Tensor
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return frequencies


EXACT_ROPE = ("default", "linear", "llama3")
"""Rotary scalings that only change the frequencies, once and for all lengths."""


def _refuse_unknown_features(hf_config: Any) -> None:
    name = hf_config.model_type
    if hf_config.hidden_act != "silu":
        raise ValueError(f"{name}: hidden_act={hf_config.hidden_act!r}; the megatron back end computes 'silu' alone.")
    if hf_config.attention_dropout:
        raise ValueError(
            f"{name}: attention_dropout={hf_config.attention_dropout}; log-probs of an update must not be random. Set "
            f"it to 0 in the model's config."
        )
    given = vars(hf_config)
    layer_types = given.get("layer_types") or []
    if "sliding_attention" in layer_types or (name == "mixtral" and given.get("sliding_window") is not None):
        raise ValueError(
            f"{name}: sliding-window attention (sliding_window={given.get('sliding_window')}) is not computed by the "
            f"megatron back end. Train this model with strategy 'fsdp2_rl'."
        )


_Family = tuple[bool, bool, MoEShape | None]
"""QKV bias, query and key norm, experts."""


def _llama(hf_config: Any) -> _Family:
    if hf_config.mlp_bias:
        raise ValueError("llama: mlp_bias=True is not supported by the megatron back end.")
    return _no_output_bias(hf_config), False, None


def _qwen2(_: Any) -> _Family:
    return True, False, None


def _qwen3(hf_config: Any) -> _Family:
    return _no_output_bias(hf_config), True, None


def _no_output_bias(hf_config: Any) -> bool:
    """``attention_bias`` of these families also puts a bias on the output projection."""
    if hf_config.attention_bias:
        raise ValueError(
            f"{hf_config.model_type}: attention_bias=True also means a bias on the output projection, which the "
            f"megatron back end does not build. Train this model with strategy 'fsdp2_rl'."
        )
    return False


def _qwen_experts(hf_config: Any) -> MoEShape:
    sparse = tuple(
        layer not in (hf_config.mlp_only_layers or []) and (layer + 1) % hf_config.decoder_sparse_step == 0
        for layer in range(hf_config.num_hidden_layers)
    )
    return MoEShape(
        num_experts=int(hf_config.num_experts),
        experts_per_token=int(hf_config.num_experts_per_tok),
        ffn_size=int(hf_config.moe_intermediate_size),
        renormalize=bool(hf_config.norm_topk_prob),
        aux_loss_coef=float(hf_config.router_aux_loss_coef) if hf_config.output_router_logits else 0.0,
        is_moe_layer=sparse,
        hf_router="mlp.gate.weight",
        hf_expert="mlp.experts.{0}.{1}.weight",
    )


def _qwen3_moe(hf_config: Any) -> _Family:
    return _no_output_bias(hf_config), True, _qwen_experts(hf_config)


def _qwen2_moe(hf_config: Any) -> _Family:
    moe = replace(
        _qwen_experts(hf_config),
        shared_ffn_size=int(hf_config.shared_expert_intermediate_size),
        hf_shared_expert="mlp.shared_expert",
        hf_shared_gate="mlp.shared_expert_gate.weight",
    )
    return bool(hf_config.qkv_bias), False, moe


def _glm4_moe(hf_config: Any) -> _Family:
    if hf_config.n_group != 1 or not hf_config.norm_topk_prob:
        raise ValueError(
            f"glm4_moe: n_group={hf_config.n_group}, norm_topk_prob={hf_config.norm_topk_prob}; the megatron back end "
            f"computes n_group=1 and norm_topk_prob=True alone. Train this model with strategy 'fsdp2_rl'."
        )
    moe = MoEShape(
        num_experts=int(hf_config.n_routed_experts),
        experts_per_token=int(hf_config.num_experts_per_tok),
        ffn_size=int(hf_config.moe_intermediate_size),
        renormalize=True,
        aux_loss_coef=0.0,
        is_moe_layer=tuple(layer >= hf_config.first_k_dense_replace for layer in range(hf_config.num_hidden_layers)),
        hf_router="mlp.gate.weight",
        hf_expert="mlp.experts.{0}.{1}.weight",
        scores="sigmoid",
        scale=float(hf_config.routed_scaling_factor),
        hf_expert_bias="mlp.gate.e_score_correction_bias",
        shared_ffn_size=int(hf_config.moe_intermediate_size * hf_config.n_shared_experts) or None,
        hf_shared_expert="mlp.shared_experts",
    )
    return bool(hf_config.attention_bias), bool(hf_config.use_qk_norm), moe


def _mixtral(hf_config: Any) -> _Family:
    if hf_config.router_jitter_noise:
        raise ValueError(
            f"mixtral: router_jitter_noise={hf_config.router_jitter_noise}; log-probs of an update must not be "
            f"random. Set it to 0 in the model's config."
        )
    moe = MoEShape(
        num_experts=int(hf_config.num_local_experts),
        experts_per_token=int(hf_config.num_experts_per_tok),
        ffn_size=int(hf_config.intermediate_size),
        renormalize=True,
        aux_loss_coef=float(hf_config.router_aux_loss_coef) if hf_config.output_router_logits else 0.0,
        is_moe_layer=(True,) * int(hf_config.num_hidden_layers),
        hf_router="block_sparse_moe.gate.weight",
        hf_expert="block_sparse_moe.experts.{0}.{1}.weight",
        hf_expert_parts=("w1", "w3", "w2"),
    )
    return False, False, moe


FAMILIES: dict[str, Callable[[Any], _Family]] = {
    "glm4_moe": _glm4_moe,
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""By ``model_type``: a reader of what differs between the families."""
