"""Configs of known families are read, and what would not be computed exactly is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.megatron import FAMILIES, tiny
from transformers import GPT2Config

from lightning_rlhf.engines.megatron.families import inverse_frequencies, model_shape


def config(family: str, **changes: Any) -> Any:
    return tiny(family).config.__class__(**{**tiny(family).config.to_dict(), **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_shape(family: str) -> None:
    shape = model_shape(tiny(family).config)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 4, 2, 16)
    assert shape.qkv_bias == (family in ("qwen2", "qwen2_moe", "glm4_moe"))
    assert shape.qk_norm == (family.startswith("qwen3") or family == "glm4_moe")
    assert shape.tied == (family == "qwen3_tied")
    assert (shape.moe is not None) == (family == "mixtral" or family.endswith("moe"))


def test_layers_with_and_without_experts() -> None:
    moe = model_shape(tiny("qwen3_moe_mixed").config).moe
    assert moe is not None
    assert moe.is_moe_layer == (True, False, True, True)
    assert not moe.renormalize


def test_aux_loss_is_asked_for_where_transformers_adds_it() -> None:
    silent, loud = (
        model_shape(config("qwen3_moe", output_router_logits=asked, router_aux_loss_coef=0.02)).moe
        for asked in (False, True)
    )
    assert silent is not None
    assert loud is not None
    assert (silent.aux_loss_coef, loud.aux_loss_coef) == (0.0, 0.02)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "dropout": ("qwen3", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "output_bias": ("llama", {"attention_bias": True}, "attention_bias=True"),
    "mlp_bias": ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    "expert_groups": ("glm4_moe", {"n_group": 2, "topk_group": 1}, "n_group=2"),
    "window": ("mixtral", {"sliding_window": 16}, "sliding_window=16"),
    "layer_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "layer_types": None},
        "sliding-window attention",
    ),
}


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_shape(config(family, **changes))


def test_unknown_family() -> None:
    with pytest.raises(ValueError, match="does not know model_type 'gpt2'; it knows glm4_moe, llama, mixtral"):
        model_shape(GPT2Config())


def test_rotary_scaling_that_also_scales_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="rotary scaling 'yarn'"):
        inverse_frequencies(config("llama", rope_parameters=YARN))


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4_moe"])
def test_rotary_frequencies_are_those_of_transformers(family: str) -> None:
    model: Any = tiny(family)
    assert torch.equal(inverse_frequencies(model.config), model.model.rotary_emb.inv_freq)


def test_linear_scaling_by_hand() -> None:
    plain = inverse_frequencies(config("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 100.0}))
    scaled = inverse_frequencies(
        config("qwen3", rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0})
    )
    torch.testing.assert_close(plain, torch.tensor([100.0 ** (-i / 8) for i in range(8)]))
    torch.testing.assert_close(scaled, plain / 4)
