"""Models of some 100,000 parameters, built from transformers' configurations without any file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # fewer than the four ranks that share a sequence in the widest layouts
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "dtype": "float32",
}


def _qwen3(**changes: Any) -> PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**_SIZES, **changes}))


_DEEP = {"num_hidden_layers": 4}  # for pipelines of four stages or chunks


def _llama() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES))


def _qwen3_moe(**changes: Any) -> PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**_SIZES, **experts, **changes}))


_BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "tiny-qwen3": _qwen3,
    "tiny-llama": _llama,
    "tiny-qwen3-tied": lambda: _qwen3(tie_word_embeddings=True),
    "tiny-qwen3-moe": _qwen3_moe,
    "tiny-qwen3-deep": lambda: _qwen3(**_DEEP),
    "tiny-qwen3-tied-deep": lambda: _qwen3(tie_word_embeddings=True, **_DEEP),
    "tiny-qwen3-moe-deep": lambda: _qwen3_moe(**_DEEP),
}
TINY_MODELS = tuple(_BUILDERS)
"""Names that `tiny_model` takes."""


def tiny_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """The model, fp32; equal for equal arguments. The global random state stays as it is.

    Norm weights are not all one, so that a weight which a back end forgets or confuses shows in the numbers.

    Args:
        name: one of ``TINY_MODELS``.
        seed: of the weights.

    Raises:
        KeyError: for another name.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS[name]().float()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("norm.weight"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model
