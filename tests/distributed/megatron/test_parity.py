"""Loss, every gradient and every weight by its Hugging Face name, in every layout, against transformers in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.megatron import Difference, compare, reference, tiny

from lightning_rlhf.engines.megatron.config import MoEOptions
from lightning_rlhf.engines.megatron.layout import MegatronLayout

TOLERANCE = 1e-5


def layout(**sizes: Any) -> MegatronLayout:
    names = {
        "tp": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
        "vpp": "virtual_pipeline_size",
        "ep": "expert_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "cp": "context_parallel_size",
        "sp": "sequence_parallel",
        "attention": "context_parallel_attention",
    }
    return MegatronLayout(**{names[name]: size for name, size in sizes.items()})


def run(world_size: int, family: str, **arguments: Any) -> Difference:
    value_head = arguments.get("value_head", False)
    tiny(family), reference(family, value_head=value_head)  # once, before the fork
    results = run_distributed(compare, world_size, family, **arguments)
    return max(results, key=lambda one: max(one.loss, one.gradient))


def check(found: Difference) -> None:
    assert found.loss < TOLERANCE, found
    assert found.gradient < TOLERANCE, found


def cases(table: dict[str, tuple[Any, ...]], *, in_the_command: str = "") -> list[Any]:
    """Parameters of a table; those whose layout the parity command's own tests run as well are slow ones."""
    slow = in_the_command.split()
    assert set(slow) <= set(table)
    return [
        pytest.param(*values, id=name, marks=[pytest.mark.slow] if name in slow else [])
        for name, values in table.items()
    ]


DENSE: dict[str, tuple[Any, ...]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "tp4_two_kv_heads": (4, {"tp": 4, "sp": True}),
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2_allgather": (2, {"cp": 2}),
    "cp2_ulysses": (2, {"cp": 2, "attention": "ulysses"}),
    "cp2_ring": (2, {"cp": 2, "attention": "ring"}),
    "cp4_allgather": (4, {"cp": 4}),
    "cp4_ulysses": (4, {"cp": 4, "attention": "ulysses"}),
    "cp4_ring": (4, {"cp": 4, "attention": "ring"}),
    "tp2_cp2_ulysses": (4, {"tp": 2, "sp": True, "cp": 2, "attention": "ulysses"}),
    "tp2_pp2_dp2": (8, {"tp": 2, "sp": True, "pp": 2}),
    "tp2_cp2_pp2": (8, {"tp": 2, "sp": True, "cp": 2, "pp": 2, "attention": "ring"}),
}


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    cases(
        DENSE,
        in_the_command="tp2 tp2_sp tp4_two_kv_heads dp2 pp2 pp4 pp2_vpp2 cp2_allgather cp2_ulysses cp2_ring "
        "cp4_allgather cp4_ulysses cp4_ring tp2_pp2_dp2 tp2_cp2_pp2",
    ),
)
def test_dense(world_size: int, sizes: dict[str, Any]) -> None:
    check(run(world_size, "qwen3", layout=layout(**sizes)))


FAMILIES: dict[str, tuple[Any, ...]] = {
    "llama_tp2": ("llama", 2, {"tp": 2}),
    "llama_pp2": ("llama", 2, {"pp": 2}),
    "qwen2_tp2_sp": ("qwen2", 2, {"tp": 2, "sp": True}),
    "qwen2_tp4": ("qwen2", 4, {"tp": 4}),
    "tied_tp2": ("qwen3_tied", 2, {"tp": 2}),
    "tied_pp4": ("qwen3_tied", 4, {"pp": 4}),
    "tied_pp2_vpp2": ("qwen3_tied", 2, {"pp": 2, "vpp": 2}),
}


@pytest.mark.parametrize(("family", "world_size", "sizes"), cases(FAMILIES, in_the_command="tied_tp2 tied_pp4"))
def test_families(family: str, world_size: int, sizes: dict[str, Any]) -> None:
    check(run(world_size, family, layout=layout(**sizes)))


EXPERTS: dict[str, tuple[Any, ...]] = {
    "one": ("qwen3_moe", 1, {}, "alltoall"),
    "ep2_alltoall": ("qwen3_moe", 2, {"ep": 2}, "alltoall"),
    "ep2_allgather": ("qwen3_moe", 2, {"ep": 2}, "allgather"),
    "tp2_etp2": ("qwen3_moe", 2, {"tp": 2, "sp": True}, "alltoall"),
    "tp2_ep2_etp1": ("qwen3_moe", 2, {"tp": 2, "sp": True, "ep": 2, "etp": 1}, "alltoall"),
    "tp2_ep2_etp2": ("qwen3_moe", 4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, "alltoall"),
    "cp2_ep2": ("qwen3_moe", 2, {"cp": 2, "ep": 2}, "alltoall"),
    "tp2_cp2_pp2_ep4": ("qwen3_moe", 8, {"tp": 2, "sp": True, "cp": 2, "pp": 2, "ep": 4, "etp": 1}, "alltoall"),
    "mixed_pp2_ep2": ("qwen3_moe_mixed", 4, {"pp": 2, "ep": 2}, "alltoall"),
    "shared_gated_tp2_ep2": ("qwen2_moe", 2, {"tp": 2, "sp": True, "ep": 2, "etp": 1}, "alltoall"),
    "shared_gated_pp2": ("qwen2_moe", 2, {"pp": 2}, "alltoall"),
    "expert_bias_tp2_ep2": ("glm4_moe", 2, {"tp": 2, "sp": True, "ep": 2, "etp": 1}, "alltoall"),
    "expert_bias_cp2_pp2": ("glm4_moe", 4, {"cp": 2, "pp": 2, "attention": "ring"}, "alltoall"),
    "mixtral_ep2": ("mixtral", 2, {"ep": 2}, "alltoall"),
    "mixtral_tp2_pp2": ("mixtral", 4, {"tp": 2, "sp": True, "pp": 2}, "alltoall"),
}


@pytest.mark.parametrize(
    ("family", "world_size", "sizes", "dispatcher"),
    cases(EXPERTS, in_the_command="ep2_alltoall ep2_allgather tp2_ep2_etp1 tp2_ep2_etp2 tp2_cp2_pp2_ep4"),
)
def test_experts(family: str, world_size: int, sizes: dict[str, Any], dispatcher: Any) -> None:
    check(run(world_size, family, layout=layout(**sizes), moe=MoEOptions(dispatcher=dispatcher)))


VALUES = {
    "tp2_sp": ("qwen3", 2, {"tp": 2, "sp": True}),
    "tied_pp2_vpp2": ("qwen3_tied", 2, {"pp": 2, "vpp": 2}),
    "tp2_cp2": ("llama", 4, {"tp": 2, "cp": 2}),
}


@pytest.mark.parametrize(("family", "world_size", "sizes"), VALUES.values(), ids=VALUES)
def test_value_model(family: str, world_size: int, sizes: dict[str, Any]) -> None:
    check(run(world_size, family, layout=layout(**sizes), value_head=True))


@pytest.mark.parametrize("recompute", ["selective", pytest.param("full", marks=pytest.mark.slow)])
def test_recompute(recompute: str) -> None:
    check(run(2, "qwen3", layout=layout(tp=2, sp=True), recompute=recompute))


@pytest.mark.slow  # the parity command has this control as well
def test_a_missing_mark_shows() -> None:
    """Negative control: without megatron's mark a norm's gradient stays that of a share of the tokens."""

    def unmark(chunks: list[Any]) -> None:
        for chunk in chunks:
            chunk.decoder.final_layernorm.weight.sequence_parallel = False

    found = run(2, "qwen3", layout=layout(tp=2, sp=True), broken=unmark)
    assert found.loss < TOLERANCE
    assert found.gradient > 100 * TOLERANCE
    assert found.worst == "model.norm.weight"


def test_other_rotary_frequencies_show() -> None:
    """Negative control: one per cent in the frequencies is another model."""

    def unsettle(chunks: list[Any]) -> None:
        for chunk in chunks:
            chunk.rotary_pos_emb.inv_freq = chunk.rotary_pos_emb.inv_freq * torch.tensor(1.01)

    assert run(2, "qwen3", layout=layout(cp=2), broken=unsettle).gradient > 10 * TOLERANCE
