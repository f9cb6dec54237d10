"""Mixtures of experts of some 100,000 parameters with the character tokenizer, in sizes of vLLM's CPU kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from support.tiny import EOS_ID, HEAD_DIM, PAD_ID, VOCAB_SIZE, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ExpertFamily = Literal["qwen3_moe", "qwen2_moe", "glm4_moe", "mixtral", "olmoe", "granitemoe"]


def tiny_experts(family: ExpertFamily = "qwen3_moe", *, expert_size: int = 64) -> PreTrainedModel:
    """Build the model, fp32, two of four experts for each token; the global RNG stays as it is.

    Args:
        family: the architecture.
        expert_size: the intermediate size of an expert.
    """
    shared: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "dtype": "float32",
        "num_experts_per_tok": 2,
    }
    own = {"intermediate_size": 128, "moe_intermediate_size": expert_size}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = {
            "qwen3_moe": lambda: Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**shared, **own, num_experts=4, norm_topk_prob=True)
            ),
            "qwen2_moe": lambda: Qwen2MoeForCausalLM(
                Qwen2MoeConfig(**shared, **own, num_experts=4, shared_expert_intermediate_size=96)
            ),
            "glm4_moe": lambda: Glm4MoeForCausalLM(
                Glm4MoeConfig(
                    **shared,
                    **own,
                    n_routed_experts=4,
                    n_shared_experts=1,
                    routed_scaling_factor=1.5,
                    first_k_dense_replace=1,
                    use_qk_norm=True,
                    num_mtp_layers=0,
                )
            ),
            "mixtral": lambda: MixtralForCausalLM(
                MixtralConfig(**shared, intermediate_size=expert_size, num_local_experts=4, sliding_window=None)
            ),
            "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**shared, intermediate_size=expert_size, num_experts=4)),
            "granitemoe": lambda: GraniteMoeForCausalLM(
                GraniteMoeConfig(**shared, intermediate_size=expert_size, num_local_experts=4)
            ),
        }[family]().float()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith(("norm.weight", "e_score_correction_bias")):
                    tensor.add_(0.1 * torch.randn_like(tensor))
                elif name.endswith(("mlp.gate.weight", "router.weight")):
                    torch.nn.init.normal_(tensor, std=0.5)  # no two experts nearly equal: last bits decide nothing
    return model.train()


def write_tiny_experts(path: Path, family: ExpertFamily = "qwen3_moe", *, expert_size: int = 64) -> Path:
    """Write the model of `tiny_experts` and the tokenizer as a Hugging Face directory; returns ``path``."""
    tiny_experts(family, expert_size=expert_size).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
