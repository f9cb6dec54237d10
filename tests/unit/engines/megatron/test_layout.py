"""Sizes that do not fit are refused before anything is loaded, and the message names the numbers."""

from __future__ import annotations

from typing import Any

import pytest
from support.megatron import tiny

from lightning_rlhf.engines.megatron.layout import MegatronLayout, check_layout, padded_vocab_size


def config(family: str = "qwen3", **changes: Any) -> Any:
    changed = tiny(family).config.__class__(**{**tiny(family).config.to_dict(), **changes})
    return changed


REFUSED = {
    "world": ({"tensor_parallel_size": 2, "context_parallel_size": 2}, {}, 6, "world size 6 .* 2 x .* 1 x .* 2 = 4"),
    "zero": ({"tensor_parallel_size": 0}, {}, 1, "tensor_parallel_size must be .* at least 1, got 0"),
    "fraction": ({"pipeline_parallel_size": 1.5}, {}, 1, "pipeline_parallel_size must be .* got 1.5"),
    "heads": ({"tensor_parallel_size": 3}, {}, 3, "tensor_parallel_size 3 does not divide the model's 4 attention"),
    "kv_heads": (
        {"tensor_parallel_size": 4},
        {"num_attention_heads": 12, "num_key_value_heads": 6},
        4,
        "tensor_parallel_size 4 neither divides the model's 6 key-value heads nor is a multiple",
    ),
    "layers": ({"pipeline_parallel_size": 3}, {}, 3, "4 layers cannot .* pipeline_parallel_size 3 x .* 1 = 3"),
    "chunks": ({"pipeline_parallel_size": 2, "virtual_pipeline_size": 3}, {}, 2, "4 layers cannot .* 2 x .* 3 = 6"),
    "no_stages": ({"virtual_pipeline_size": 2}, {}, 1, "virtual_pipeline_size=2 needs pipeline_parallel_size above 1"),
    "sp": ({"sequence_parallel": True}, {}, 1, "sequence_parallel=True needs tensor_parallel_size above 1"),
    "width": ({"tensor_parallel_size": 4}, {"intermediate_size": 130}, 4, "4 does not divide the MLP's width 130"),
    "ulysses": (
        {"tensor_parallel_size": 2, "context_parallel_size": 4, "context_parallel_attention": "ulysses"},
        {},
        8,
        "2 heads a rank .*4 heads / tensor_parallel_size 2.* context_parallel_size 4",
    ),
    "attention": ({"context_parallel_attention": "rings"}, {}, 1, "one of allgather, ulysses, ring, got 'rings'"),
    "no_experts": ({"expert_parallel_size": 2}, {}, 2, "expert_parallel_size=2.* qwen3 has no experts"),
}


@pytest.mark.parametrize(("sizes", "changes", "world_size", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(sizes: dict[str, Any], changes: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(MegatronLayout(**sizes), config(**changes), world_size)


EXPERTS_REFUSED = {
    "experts": ({"expert_parallel_size": 3}, 3, "expert_parallel_size 3 does not divide the model's 4 experts"),
    "world": ({"expert_parallel_size": 4}, 2, "world size 2 .* expert_parallel_size 4 x .* 1 x .* 1 = 4"),
    "width": (
        {"expert_tensor_parallel_size": 64},
        64,
        "expert_tensor_parallel_size 64 does not divide an expert's width 32",
    ),
    "sp": ({"tensor_parallel_size": 2}, 2, "tensor_parallel_size 2 need sequence_parallel=True"),
    "default_etp": (
        {"tensor_parallel_size": 2, "expert_parallel_size": 2, "sequence_parallel": True},
        2,
        "world size 2 .* 2 x expert_tensor_parallel_size 2 x .* 1 = 4.* expert_tensor_parallel_size=1",
    ),
}


@pytest.mark.parametrize(("sizes", "world_size", "message"), EXPERTS_REFUSED.values(), ids=EXPERTS_REFUSED)
def test_experts_refused(sizes: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(MegatronLayout(**sizes), config("qwen3_moe"), world_size)


def test_c05_three_key_value_heads_on_four_ranks() -> None:
    changed = config(num_attention_heads=12, num_key_value_heads=3)
    with pytest.raises(ValueError, match="tensor_parallel_size 4 neither divides the model's 3 key-value heads"):
        check_layout(MegatronLayout(tensor_parallel_size=4), changed, 4)


def test_c05_ulysses_with_forty_heads_and_eight_key_value_heads() -> None:
    changed = config(num_attention_heads=40, num_key_value_heads=8)
    for size in (1, 2, 4, 8, 40):
        check_layout(MegatronLayout(context_parallel_size=size, context_parallel_attention="ulysses"), changed, size)
    for size in (5, 10, 16, 20):
        layout = MegatronLayout(context_parallel_size=size, context_parallel_attention="ulysses")
        with pytest.raises(ValueError, match=f"among context_parallel_size {size} ranks"):
            check_layout(layout, changed, size)


@pytest.mark.parametrize(
    ("family", "sizes", "world_size"),
    [
        ("qwen3", {"tensor_parallel_size": 4}, 4),  # more ranks than its two key-value heads
        ("qwen3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "context_parallel_size": 2}, 16),
        ("qwen3_moe", {"expert_parallel_size": 4, "expert_tensor_parallel_size": 1}, 4),
    ],
)
def test_accepted(family: str, sizes: dict[str, Any], world_size: int) -> None:
    check_layout(MegatronLayout(**sizes), config(family), world_size)


def test_vocabulary_is_padded_to_equal_shares() -> None:
    sizes = [padded_vocab_size(61, MegatronLayout(tensor_parallel_size=tp)) for tp in (1, 2, 4, 8)]
    assert sizes == [61, 62, 64, 64]


def test_description() -> None:
    layout = MegatronLayout(tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=2)
    assert layout.describe() == "tp=2 sp pp=2 vpp=1 cp=1 ep=1 etp=2"
