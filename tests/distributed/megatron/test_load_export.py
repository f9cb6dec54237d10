"""Weights in and out: files on disk, ranges, dtypes, names that do not fit, and groups made anew."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fork import run_distributed
from support.megatron import build, reference, tiny
from torch import Tensor

from lightning_rlhf.engines.megatron.backend import choose_backend
from lightning_rlhf.engines.megatron.export import export_parameters
from lightning_rlhf.engines.megatron.layout import MegatronLayout, destroy_groups, initialize_groups
from lightning_rlhf.engines.megatron.load import SafetensorsSource, StateDictSource, load_parameters
from lightning_rlhf.engines.megatron.model import build_model

TP2_SP_PP2 = MegatronLayout(tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=2)


class CountingSource:
    """Counts the elements that are read."""

    def __init__(self, source: Any) -> None:
        self.source, self.elements = source, 0

    def names(self) -> set[str]:
        found: set[str] = self.source.names()
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        found: tuple[int, ...] = self.source.shape(name)
        return found

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        part: Tensor = self.source.read(name, dim, start, stop)
        self.elements += part.numel()
        return part


def from_disk(directory: Path, family: str, layout: MegatronLayout) -> tuple[int, list[str]]:
    """Elements that this rank has read, and the names of tensors that came out otherwise than they went in."""
    hf_config, backend = tiny(family).config, choose_backend("cpu")
    with backend.active():
        initialize_groups(layout)
        chunks = build_model(hf_config, layout=layout, backend=backend)
        source = CountingSource(SafetensorsSource(directory))
        load_parameters(chunks, source, hf_config=hf_config)
        expected = reference(family).weights
        exported = {name: t.clone() for name, t in export_parameters(chunks, hf_config=hf_config)}
    wrong = [name for name in exported.keys() | expected.keys() if not torch.equal(exported[name], expected[name])]
    return source.elements, wrong


@pytest.mark.parametrize("family", ["qwen2", "qwen3_tied", "qwen3_moe", "mixtral"])
def test_files_of_save_pretrained_and_only_a_ranks_share_of_them(family: str, tmp_path: Path) -> None:
    tiny(family).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = reference(family).weights
    total = sum(one.numel() for one in weights.values())
    ranks = run_distributed(from_disk, 4, tmp_path, family, TP2_SP_PP2)
    assert all(wrong == [] for _, wrong in ranks)
    replicated = sum(one.numel() for name, one in weights.items() if one.dim() == 1 or "gate.weight" in name)
    embeddings = 61 * 64 * (2 if family == "qwen3_tied" else 1)
    most = (total - replicated) / 4 + replicated + embeddings
    assert all(elements <= most for elements, _ in ranks), (ranks, most, total)


def spoiled(change: Any) -> str:
    backend, hf_config = choose_backend("cpu"), tiny("qwen3").config
    weights = dict(reference("qwen3").weights)
    change(weights)
    with backend.active():
        initialize_groups(MegatronLayout())
        chunks = build_model(hf_config, layout=MegatronLayout(), backend=backend)
        with pytest.raises(ValueError) as caught:
            load_parameters(chunks, StateDictSource(weights), hf_config=hf_config)
    return str(caught.value)


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"

SPOILED = {
    "missing": (lambda weights: weights.pop(QUERY), f"lack {QUERY}"),
    "unknown": (
        lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias_scale": torch.zeros(1)}),
        "hold 1 tensors .*bias_scale",
    ),
    "short": (
        lambda weights: weights.update({NORM: torch.zeros(60)}),
        r"norm.weight has the shape \(60,\), .* \(64,\)",
    ),
    "narrow": (lambda weights: weights.update({QUERY: torch.zeros(64, 60)}), r"shape \(64, 60\), .* \(64, 64\)"),
    "vocabulary": (
        lambda weights: weights.update({"lm_head.weight": torch.zeros(64, 64)}),
        r"lm_head.weight has the shape \(64, 64\), .* \(61, 64\)",
    ),
}


@pytest.mark.parametrize(("change", "message"), SPOILED.values(), ids=SPOILED)
def test_weights_that_do_not_fit(change: Any, message: str) -> None:
    (said,) = run_distributed(spoiled, 1, change)
    assert re.search(message, said), said


_FP32 = ("mlp.gate.weight", "e_score_correction_bias", "score.weight")


def with_layers_for_prediction() -> None:
    """Checkpoints of this family hold a layer more, which nobody asks for."""
    hf_config = copy.deepcopy(tiny("glm4_moe").config)
    weights = dict(reference("glm4_moe").weights) | {"model.layers.4.eh_proj.weight": torch.zeros(1)}
    with choose_backend("cpu").active():
        initialize_groups(MegatronLayout())
        chunks = build_model(hf_config, layout=MegatronLayout(), backend=choose_backend("cpu"))
        with pytest.raises(ValueError, match="eh_proj"):
            load_parameters(chunks, StateDictSource(weights), hf_config=hf_config)
        hf_config.num_mtp_layers = 1
        load_parameters(chunks, StateDictSource(weights), hf_config=hf_config)


def test_layers_for_multi_token_prediction_are_left_out_as_in_transformers() -> None:
    run_distributed(with_layers_for_prediction, 1)


def dtypes(family: str, layout: MegatronLayout, value_head: bool) -> dict[str, torch.dtype]:
    with choose_backend("cpu").active():
        chunks = build(family, layout, value_head=value_head, compute_dtype=torch.bfloat16)
        exported = {name: t.clone() for name, t in export_parameters(chunks, hf_config=tiny(family).config)}
    expected = reference(family, value_head=value_head).weights
    for name in exported:
        if name.endswith(_FP32):
            assert torch.equal(exported[name], expected[name]), name  # bit for bit: no detour over bf16
    return {name: tensor.dtype for name, tensor in exported.items()}


@pytest.mark.parametrize(("family", "value_head"), [("qwen3_moe", True), ("glm4_moe", False)])
def test_routers_and_value_heads_stay_fp32_in_bf16(family: str, value_head: bool) -> None:
    layout = MegatronLayout(pipeline_parallel_size=2, expert_parallel_size=2)
    reference(family, value_head=value_head)
    for found in run_distributed(dtypes, 4, family, layout, value_head):
        full = {name for name, dtype in found.items() if dtype == torch.float32}
        assert full == {name for name in found if name.endswith(_FP32)}
        assert set(found.values()) == {torch.float32, torch.bfloat16}


def no_head(layout: MegatronLayout) -> Tensor:
    """A value model from a language model's weights."""
    backend, hf_config = choose_backend("cpu"), tiny("qwen3").config
    with backend.active():
        initialize_groups(layout)
        chunks = build_model(hf_config, layout=layout, backend=backend, value_head=True)
        load_parameters(chunks, StateDictSource(reference("qwen3").weights), hf_config=hf_config)
        exported = {name: t.clone() for name, t in export_parameters(chunks, hf_config=hf_config)}
    assert "lm_head.weight" not in exported
    return exported["score.weight"]


def test_a_value_head_starts_at_zero() -> None:
    for weight in run_distributed(no_head, 2, MegatronLayout(pipeline_parallel_size=2)):
        assert torch.equal(weight, torch.zeros(1, 64))


def several_layouts() -> list[tuple[int, int, list[int]]]:
    """Data-parallel rank and size, and the data-parallel ranks in the model-parallel group, layout after layout."""
    found = []
    for sizes in (
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ):
        layout = MegatronLayout(**sizes)
        with choose_backend("cpu").active():
            build("qwen3", layout)
            groups = initialize_groups(layout)
            assert initialize_groups(layout).data_parallel_group is groups.data_parallel_group
        together: list[Any] = [None] * dist.get_world_size(groups.model_parallel_group)
        dist.all_gather_object(together, groups.data_parallel_rank, group=groups.model_parallel_group)
        found.append((groups.data_parallel_rank, groups.data_parallel_size, together))
    destroy_groups()
    return found


def test_groups_of_one_layout_after_another() -> None:
    reference("qwen3")
    ranks = run_distributed(several_layouts, 4)
    assert [[rank for rank, _, _ in one] for one in ranks] == [
        [0, 0, 0, 0],
        [0, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 1, 0],
    ]
    for one in ranks:
        assert [size for _, size, _ in one] == [2, 2, 2, 1]
        assert all(together == [rank] * (4 // size) for rank, size, together in one)


def peak(layout: MegatronLayout) -> list[int]:
    """Elements of each exported tensor's storage: what is held whole at a time."""
    with choose_backend("cpu").active():
        chunks = build("qwen3_moe", layout)
        exported = partial(export_parameters, chunks, hf_config=tiny("qwen3_moe").config)
        return [tensor.untyped_storage().nbytes() // 4 for _, tensor in exported()]


def test_one_parameter_is_held_at_a_time() -> None:
    reference("qwen3_moe")
    for sizes in run_distributed(peak, 2, MegatronLayout(expert_parallel_size=2)):
        assert max(sizes) == (4 + 2 + 2) * 16 * 64  # the fused projection of a layer is the largest
