"""Megatron's TransformerConfig from a Hugging Face config, for every family, layout and machine in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_rlhf.engines.megatron.backend import MegatronBackend
from lightning_rlhf.engines.megatron.families import ModelShape, MoEShape, model_shape
from lightning_rlhf.engines.megatron.layout import MegatronLayout

Recompute = Literal["none", "selective", "full"]
Dispatcher = Literal["alltoall", "allgather"]
RouterReplay = Literal["off", "old"]

ROLLOUT_REPLAY_IS_BLOCKED = (
    "router_replay='rollout' is blocked: vLLM 0.32 returns the experts that it chose (enable_return_routed_experts) "
    "from its V2 model runner alone, which requires Triton, so that it was never run where this package is tested. Use "
    "'old', which replays the choices that the old log-probs were computed with, or 'off'."
)


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """How a mixture of experts is trained; nothing here changes which model it is."""

    dispatcher: Dispatcher = "alltoall"
    """How tokens reach their experts. For ``allgather`` all micro-batches are padded to the largest one's tokens."""
    aux_loss_coef: float | None = None
    """Of the load-balancing loss, which is over each micro-batch; None: the config's, if the model outputs router
    logits; else none. Megatron's other losses would differ from layout to layout: packed micro-batches are one sequence
    to its seq_aux_loss, and its global_aux_loss depends on the order of micro-batches."""
    z_loss_coef: float = 0.0
    """Of the loss that keeps the router's logits small."""
    expert_bias_update_rate: float = 0.0
    """How far each step moves the bias by which experts are chosen, towards those that got few tokens. 0 keeps the
    model's: a policy that others sample from must not choose otherwise because of its load."""
    router_replay: RouterReplay = "off"
    """Whose choice of experts the actor's update makes: the router's own, or that of the pass that computed the old
    log-probs."""

    def __post_init__(self) -> None:
        """Refuses what there is not.

        Raises:
            ValueError: for an unknown dispatcher or replay.
        """
        if self.dispatcher not in get_args(Dispatcher):
            raise ValueError(f"moe_dispatcher must be one of {get_args(Dispatcher)}, got {self.dispatcher!r}.")
        if self.router_replay not in get_args(RouterReplay):
            if str(self.router_replay) == "rollout":
                raise ValueError(ROLLOUT_REPLAY_IS_BLOCKED)
            raise ValueError(f"router_replay must be one of {get_args(RouterReplay)}, got {self.router_replay!r}.")


def transformer_config(
    hf_config: Any,
    *,
    layout: MegatronLayout,
    backend: MegatronBackend,
    compute_dtype: torch.dtype,
    recompute: Recompute = "none",
    moe: MoEOptions | None = None,
) -> Any:
    """Build megatron's config.

    Args:
        hf_config: of a family in ``FAMILIES``.
        layout: checked by ``check_layout``.
        backend: the machine.
        compute_dtype: of parameters and activations; float32 or bfloat16.
        recompute: which activations the backward computes again: none, those inside attention, or all of each layer.
        moe: options of a mixture of experts; ignored by dense models. None: the defaults.

    Returns:
        A ``megatron.core.transformer.TransformerConfig``.

    Raises:
        ValueError: for a model or a dtype that this back end does not compute.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    if compute_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"compute_dtype must be torch.float32 or torch.bfloat16, got {compute_dtype}.")
    shape = model_shape(hf_config)
    fields = {
        **_parallel_fields(layout, compute_dtype),
        **_model_fields(shape),
        **backend.config_fields(layout),
        **_recompute_fields(recompute),
        # upstream refuses variable lengths with the default dispatcher, for dense models as well
        "moe_token_dispatcher_type": "alltoall",
    }
    if shape.moe is not None:
        fields |= _moe_fields(shape.moe, moe or MoEOptions(), layout)
    return TransformerConfig(**fields)


def _parallel_fields(layout: MegatronLayout, compute_dtype: torch.dtype) -> dict[str, Any]:
    vpp = layout.virtual_pipeline_size
    return {
        "tensor_model_parallel_size": layout.tensor_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_parallel_size,
        "expert_tensor_parallel_size": layout.etp_size,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": compute_dtype,
        "pipeline_dtype": compute_dtype,
        "bf16": compute_dtype == torch.bfloat16,
        # packed micro-batches differ in length, and stages tell each other how long one is
        "variable_seq_lengths": True,
        # losses are sums over tokens: the number of ranks and micro-batches must not change them
        "calculate_per_token_loss": True,
        # on the device directly, in the parallel shapes; a full matrix is never made on a rank
        "use_cpu_initialization": False,
        # it also marks which parameters are cut, without which the gradient's norm counts some of them twice
        "perform_initialization": True,
        "init_method": _leave_empty,
        "output_layer_init_method": _leave_empty,
    }


def _leave_empty(tensor: Tensor) -> Tensor:
    """Import fills every parameter."""
    return tensor


def _model_fields(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "qk_layernorm": shape.qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _recompute_fields(recompute: Recompute) -> dict[str, Any]:
    if recompute == "none":
        return {}
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    raise ValueError(f"recompute must be 'none', 'selective' or 'full', got {recompute!r}.")


def _moe_fields(shape: MoEShape, options: MoEOptions, layout: MegatronLayout) -> dict[str, Any]:
    coefficient = shape.aux_loss_coef if options.aux_loss_coef is None else options.aux_loss_coef
    # Gradients are divided by all tokens of the mini-batch, so megatron multiplies a rank's mean of squared logits by
    # the rank's tokens, and then divides by the tensor and context parallel ranks (router.py:484), whose sums add up.
    ranks = layout.tensor_parallel_size * layout.context_parallel_size
    return {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.ffn_size,
        "moe_layer_freq": [int(is_moe) for is_moe in shape.is_moe_layer],
        "moe_router_topk": shape.experts_per_token,
        # softmax over the chosen experts' logits is the renormalised softmax over all of them
        "moe_router_pre_softmax": not shape.renormalize and shape.scores == "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if coefficient else "none",
        "moe_aux_loss_coeff": coefficient,
        "moe_z_loss_coeff": options.z_loss_coef * ranks or None,
        "moe_token_dispatcher_type": options.dispatcher,
        "variable_seq_lengths": options.dispatcher == "alltoall",
        "moe_router_score_function": shape.scores,
        "moe_router_topk_scaling_factor": None if shape.scale == 1.0 else shape.scale,
        "moe_router_enable_expert_bias": shape.hf_expert_bias is not None,
        "moe_router_bias_update_rate": options.expert_bias_update_rate,
        "moe_shared_expert_intermediate_size": shape.shared_ffn_size,
        "moe_shared_expert_gate": shape.hf_shared_gate is not None,
    }
