"""The table of names: every spelling of megatron's specs, and which rows of a tensor a rank holds."""

from __future__ import annotations

import pytest
import torch
from support.megatron import FAMILIES, reference, tiny

from lightning_rlhf.engines.megatron.families import model_shape
from lightning_rlhf.engines.megatron.names import hf_shapes, is_known_hf_name, look_up, pieces, with_expert

LAYER = "decoder.layers.3."
ATTENTION, MLP = LAYER + "self_attention.", LAYER + "mlp."
HF = "model.layers.3."


@pytest.mark.parametrize(
    ("name", "kind", "hf_names"),
    [
        ("embedding.word_embeddings.weight", "vocab", ["model.embed_tokens.weight"]),
        ("output_layer.weight", "vocab", ["lm_head.weight"]),
        ("value_head.weight", "plain", ["score.weight"]),
        ("decoder.final_layernorm.weight", "plain", ["model.norm.weight"]),
        (LAYER + "input_layernorm.weight", "plain", [HF + "input_layernorm.weight"]),
        (ATTENTION + "linear_qkv.layer_norm_weight", "plain", [HF + "input_layernorm.weight"]),
        (ATTENTION + "linear_qkv.weight", "qkv", [HF + f"self_attn.{p}_proj.weight" for p in "qkv"]),
        (ATTENTION + "k_layernorm.weight", "plain", [HF + "self_attn.k_norm.weight"]),
        (ATTENTION + "linear_proj.weight", "row", [HF + "self_attn.o_proj.weight"]),
        (LAYER + "pre_mlp_layernorm.weight", "plain", [HF + "post_attention_layernorm.weight"]),
        (MLP + "linear_fc1.layer_norm_weight", "plain", [HF + "post_attention_layernorm.weight"]),
        (MLP + "linear_fc1.weight", "gate_up", [HF + "mlp.gate_proj.weight", HF + "mlp.up_proj.weight"]),
        (MLP + "linear_fc2.weight", "row", [HF + "mlp.down_proj.weight"]),
        (MLP + "router.weight", "plain", [HF + "mlp.gate.weight"]),
        (MLP + "experts.local_experts.2.linear_fc2.weight", "row", [HF + "mlp.experts.2.down_proj.weight"]),
        (MLP + "experts.linear_fc2.weight2", "row", [HF + "mlp.experts.2.down_proj.weight"]),
        (
            MLP + "experts.linear_fc1.weight2",
            "gate_up",
            [HF + "mlp.experts.2.gate_proj.weight", HF + "mlp.experts.2.up_proj.weight"],
        ),
    ],
)
def test_look_up(name: str, kind: str, hf_names: list[str]) -> None:
    found = look_up(name, model_shape(tiny("qwen3_moe").config))
    assert (found.kind, list(found.hf_names)) == (kind, hf_names)
    assert found.is_expert == ("experts." in name)


def test_biases_are_known_where_the_family_has_them() -> None:
    found = look_up(ATTENTION + "linear_qkv.bias", model_shape(tiny("qwen2").config))
    assert (found.kind, found.hf_names) == ("qkv", tuple(HF + f"self_attn.{p}_proj.bias" for p in "qkv"))
    assert not is_known_hf_name(HF + "self_attn.q_proj.bias", model_shape(tiny("qwen3").config))
    assert not is_known_hf_name(HF + "self_attn.q_norm.weight", model_shape(tiny("qwen2").config))


def test_mixtral_has_names_of_its_own() -> None:
    shape = model_shape(tiny("mixtral").config)
    found = look_up(MLP + "experts.local_experts.0.linear_fc1.weight", shape)
    assert found.hf_names == tuple(HF + f"block_sparse_moe.experts.0.{part}.weight" for part in ("w1", "w3"))


def test_a_tied_head_is_the_embedding() -> None:
    found = look_up("output_layer.weight", model_shape(tiny("qwen3_tied").config))
    assert found.hf_names == ("model.embed_tokens.weight",)


def test_a_name_that_no_rule_knows() -> None:
    with pytest.raises(KeyError, match=r"mlp\.router\.weight' of qwen3"):
        look_up(MLP + "router.weight", model_shape(tiny("qwen3").config))


def test_with_expert() -> None:
    assert with_expert("a.experts.linear_fc1.weight7", lambda e: e + 8) == "a.experts.linear_fc1.weight15"
    assert with_expert("a.experts.local_experts.1.b", lambda e: e + 8) == "a.experts.local_experts.9.b"
    assert with_expert("a.layers.1.b", lambda e: e + 8) == "a.layers.1.b"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_on_disk_is_known(family: str) -> None:
    shape = model_shape(tiny(family).config)
    assert all(is_known_hf_name(name, shape) for name in reference(family).weights)
    assert not is_known_hf_name("model.layers.0.self_attn.o_proj.bias", shape)
    assert not is_known_hf_name("model.layers.x.input_layernorm.weight", shape)


def test_pieces_of_the_fused_projection_by_hand() -> None:
    """Four heads, two key-value heads, head_dim 16: rows are q0 q1 k0 v0 q2 q3 k1 v1, 16 each."""
    shape = model_shape(tiny("qwen3").config)

    def of(rank: int, ranks: int) -> list[tuple[int, int, int]]:
        return [(p.hf_index, p.start, p.stop) for p in pieces("qkv", (128 // ranks, 64), shape, rank=rank)]

    assert of(0, 1) == [(0, 0, 32), (1, 0, 16), (2, 0, 16), (0, 32, 64), (1, 16, 32), (2, 16, 32)]
    assert of(1, 2) == [(0, 32, 64), (1, 16, 32), (2, 16, 32)]
    # four ranks, two key-value heads: a rank holds both queries of a group, or its key and value
    assert of(2, 4) == [(0, 32, 64)]
    assert of(3, 4) == [(1, 16, 32), (2, 16, 32)]


@pytest.mark.parametrize("kind", ["vocab", "row", "qkv", "gate_up"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pieces_cover_everything_once(kind: str, ranks: int) -> None:
    shape = model_shape(tiny("qwen3").config)
    local = {
        "vocab": (-(-61 // ranks), 64),
        "row": (64, 128 // ranks),
        "qkv": (128 // ranks, 64),
        "gate_up": (256 // ranks, 64),
    }[kind]
    seen = [torch.zeros(one) for one in hf_shapes(kind, local, shape, size=ranks)]  # type: ignore[arg-type]
    for rank in range(ranks):
        for piece in pieces(kind, local, shape, rank=rank):  # type: ignore[arg-type]
            seen[piece.hf_index].narrow(piece.dim, piece.start, piece.stop - piece.start).add_(1)
    assert all(torch.equal(one, torch.ones_like(one)) for one in seen)


def test_ranks_that_hold_only_padding() -> None:
    shape = model_shape(tiny("qwen3").config)
    assert [pieces("vocab", (40, 64), shape, rank=rank) for rank in (2, 3)] == [[], []]
