"""A model's sizes from its ``config.json`` alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_rlhf.cli.architectures import model_config
from lightning_rlhf.cli.estimate import ModelShape
from lightning_rlhf.engines.adapter import add_adapter


def read_model_shape(path: str | Path) -> ModelShape:
    """Builds the model without memory for its weights (on the meta device) and counts.

    Args:
        path: as of ``model_config``; nothing is fetched.

    Raises:
        ValueError: if there is no such configuration, or it is not of a causal language model.
    """
    try:
        config = model_config(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"there is no readable config.json of a causal language model at {path}: {reason}") from error
    text: Any = config.get_text_config()
    kinds: Any = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    numbers = text.to_dict()
    num_heads = int(numbers["num_attention_heads"])
    return ModelShape(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        layer_parameters=max(sizes, default=0),
        num_layers=len(layers),
        hidden_size=int(numbers["hidden_size"]),
        mlp_width=_mlp_width(numbers),
        num_heads=num_heads,
        num_kv_heads=int(numbers.get("num_key_value_heads") or num_heads),
        head_dim=int(numbers.get("head_dim") or numbers["hidden_size"] // num_heads),
        vocab_size=int(numbers["vocab_size"]),
        expert_parameters=max((_expert_parameters(layer) for layer in layers), default=0),
        experts_per_token=int(numbers.get("num_experts_per_tok") or 0),
    )


def with_adapter(shape: ModelShape, path: str | Path, lora: object | None) -> ModelShape:
    """The shape under an adapter, which is made for counting; the model's own weights take no memory.

    Args:
        shape: of the model.
        path: as of ``model_config``; nothing is fetched.
        lora: a ``LoRAConfig``, a ``peft.LoraConfig``, or None for none.

    Raises:
        ValueError: if the adapter does not fit the model.
    """
    if lora is None:
        return shape
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(path)).requires_grad_(False)
    add_adapter(model, lora)
    return replace(shape, adapter_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad))


def _expert_parameters(layer: nn.Module) -> int:
    named = layer.named_parameters()
    return sum(parameter.numel() for name, parameter in named if "experts" in name.split("."))


def _mlp_width(numbers: dict[str, Any]) -> int:
    if numbers.get("num_experts_per_tok") and numbers.get("moe_intermediate_size"):
        return int(numbers["num_experts_per_tok"]) * int(numbers["moe_intermediate_size"])
    return int(numbers.get("intermediate_size") or 4 * numbers["hidden_size"])
