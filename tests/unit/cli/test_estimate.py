"""The formulas by hand, and activations against what autograd really keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_rlhf.cli.estimate import (
    Layout,
    ModelShape,
    activation_bytes,
    activation_bytes_per_layer,
    communication,
    kv_cache_bytes,
    logits_bytes,
    optimizer_state_bytes,
    training_memory,
    value_model,
)
from lightning_rlhf.cli.estimate_megatron import pipeline_of_run
from lightning_rlhf.cli.model_shape import read_model_shape
from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.parity.tiny_models import tiny_model
from lightning_rlhf.types import Experience

SHAPE = ModelShape(
    num_parameters=1000,
    layer_parameters=300,
    num_layers=2,
    hidden_size=8,
    mlp_width=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=50,
)


def test_activations_of_a_layer_by_hand() -> None:
    # bf16: norms 2*8*(4+4) = 128, attention 2*(12+4)*2 = 64, mlp 4*2*20 = 160
    assert activation_bytes_per_layer(SHAPE, compute_bytes=2) == 352
    # fp32: 2*8*(4+8) = 192, 4*16*2 = 128, 4*4*20 = 320
    assert activation_bytes_per_layer(SHAPE, compute_bytes=4) == 640


def test_activations_fall_with_recomputation_and_with_ranks_that_share_a_sequence() -> None:
    common = {"tokens": 11, "compute_bytes": 2}
    assert activation_bytes(SHAPE, **common, gradient_checkpointing=False) == 11 * 2 * 352
    # each of two layers keeps 8 numbers of 2 bytes, and one has the rest
    assert activation_bytes(SHAPE, **common, gradient_checkpointing=True) == 11 * (2 * 16 + 352)
    # 11 tokens over 4 ranks: 3 on the fullest
    assert activation_bytes(SHAPE, **common, gradient_checkpointing=False, sequence_shards=4) == 3 * 704


def test_logits_and_cache_by_hand() -> None:
    assert logits_bytes(SHAPE, tokens=7, chunk_size=512) == 2 * 4 * 7 * 50
    assert logits_bytes(SHAPE, tokens=1000, chunk_size=16) == 2 * 4 * 16 * 50
    assert kv_cache_bytes(SHAPE, tokens=10, element_bytes=2) == 2 * 2 * 2 * 2 * 2 * 10


def _memory(**changes: object) -> dict[str, int]:
    arguments = {
        "layout": Layout(shards=4),
        "compute_bytes": 2,
        "state_bytes": 8,
        "tokens": 10,
        "scored_tokens": 6,
        "chunk_size": 512,
        "accumulates": False,
        "gradient_checkpointing": False,
        "has_reference": True,
    }
    return training_memory(SHAPE, **{**arguments, **changes})  # type: ignore[arg-type]


def test_memory_of_a_rank_by_hand() -> None:
    assert _memory() == {
        "parameters": 4 * 250,
        "gradients": 4 * 250,
        "optimizer_state": 8 * 250,
        "reference": 4 * 250,
        "gathered_parameters": 2 * (2 * 300 + 400),
        "activations": 10 * 2 * 352,
        "logits_chunk": 8 * 6 * 50,
    }


def test_gradients_are_whole_while_micro_batches_add_up() -> None:
    assert _memory(accumulates=True)["gradients"] == 4 * 1000


def test_one_rank_gathers_nothing_but_casts() -> None:
    alone = Layout()
    assert _memory(layout=alone, compute_bytes=4)["gathered_parameters"] == 0
    assert _memory(layout=alone)["gathered_parameters"] == 2 * 1000
    assert _memory(layout=alone)["parameters"] == 4 * 1000


def test_layers_that_stay_are_all_held() -> None:
    deep = dataclasses.replace(SHAPE, num_parameters=400 + 5 * 300, num_layers=5)
    arguments = {"compute_bytes": 2, "state_bytes": 8, "tokens": 1, "scored_tokens": 1, "chunk_size": 1}
    flags = {"accumulates": False, "gradient_checkpointing": False, "has_reference": False}
    for reshard, layers in ((True, 2), (False, 5)):
        layout = Layout(shards=2, reshard_after_forward=reshard)
        found = training_memory(deep, layout=layout, **arguments, **flags)  # type: ignore[arg-type]
        assert found["gathered_parameters"] == 2 * (layers * 300 + 400)


def _traffic(layout: Layout) -> dict[str, int]:
    return communication(
        SHAPE,
        layout=layout,
        compute_bytes=2,
        training_micro_batches=3,
        inference_micro_batches=5,
        optimizer_steps=2,
        pushes=1,
    )


def test_traffic_by_hand() -> None:
    assert _traffic(Layout(shards=4)) == {
        "all_gather": 2 * (3 * 2000 + 5 * 1000) * 3 // 4,
        "reduce_scatter": 2 * 4000 * 3 // 4,
        "all_reduce": 0,
        "weight_push_all_gather": 4000 * 3 // 4,
    }
    assert _traffic(Layout(shards=4, reshard_after_forward=False))["all_gather"] == 2 * (3 * 1400 + 5000) * 3 // 4
    # two copies: each rank's quarter of the gradients goes around twice, half each time
    assert _traffic(Layout(shards=4, replicas=2))["all_reduce"] == 2 * 2 * 1000 // 2
    assert set(_traffic(Layout()).values()) == {0}


def test_a_critic_has_one_row_in_place_of_a_head_of_its_own() -> None:
    # root 400 = an embedding of 50 x 8, which is the head as well
    assert value_model(SHAPE).num_parameters == 1000 + 8
    untied = dataclasses.replace(SHAPE, num_parameters=1400)
    assert value_model(untied).num_parameters == 1400 - 400 + 8


def test_optimizer_state_by_name() -> None:
    assert optimizer_state_bytes("torch.optim.AdamW") == 8
    assert optimizer_state_bytes("torch.optim.SGD") == 0
    assert optimizer_state_bytes("torch.optim.SGD", momentum=0.9) == 4
    assert optimizer_state_bytes("elsewhere.Muon") is None


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3-tied", "tiny-qwen3-moe"])
def test_a_shape_is_read_from_config_json_alone(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    model.config.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    shape = read_model_shape(tmp_path)
    layer = model.model.layers[0]
    assert shape == ModelShape(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        layer_parameters=sum(parameter.numel() for parameter in layer.parameters()),
        num_layers=2,
        hidden_size=64,
        mlp_width=64 if name == "tiny-qwen3-moe" else 128,  # two experts of 32
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=96,
        expert_parameters=4 * 3 * 64 * 32 if name == "tiny-qwen3-moe" else 0,
        experts_per_token=2 if name == "tiny-qwen3-moe" else 0,
    )


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no readable config.json of a causal language model at .*nowhere"):
        read_model_shape(tmp_path / "nowhere")


def test_activations_are_what_autograd_keeps(tmp_path: Path) -> None:
    lengths = [64, 64, 64, 64]
    tokens = sum(lengths)
    model = tiny_model("tiny-llama")
    model.config.save_pretrained(tmp_path)
    engine = TorchEngine(EngineConfig(model=model, optimizer=torch.optim.AdamW), device=torch.device("cpu"))
    engine.initialize()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # a storage that is freed could lend its address to the next

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    batch = _experience(lengths)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.packed(batch.tokens, batch.cu_seqlens, batch.response_mask, 1.0, False)
    expected = activation_bytes(
        read_model_shape(tmp_path), tokens=tokens, compute_bytes=4, gradient_checkpointing=False
    )
    assert sum(kept.values()) == pytest.approx(expected, rel=0.15)


def _experience(lengths: list[int]) -> Experience:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    num_tokens = int(cu_seqlens[-1])
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    mask[1] = True
    return Experience(
        tokens=torch.arange(num_tokens) % 96,
        cu_seqlens=cu_seqlens,
        response_mask=mask,
        loss_mask=mask,
        rollout_log_probs=torch.zeros(num_tokens),
        advantages=torch.zeros(num_tokens),
        uids=[str(row) for row in range(len(lengths))],
        sample_indices=[0] * len(lengths),
    )


def test_an_adapter_alone_has_gradients_and_optimizer_state() -> None:
    shape = dataclasses.replace(SHAPE, adapter_parameters=40)
    memory = training_memory(
        shape, layout=Layout(shards=4), compute_bytes=4, state_bytes=8, tokens=10, scored_tokens=10, chunk_size=5,
        accumulates=True, gradient_checkpointing=False, has_reference=False,
    )  # fmt: skip
    assert memory["parameters"] == 4 * (1000 + 40) // 4
    assert memory["gradients"] == 4 * 40  # whole ones, while micro-batches add up
    assert memory["optimizer_state"] == 8 * 40 // 4
    traffic = communication(
        shape, layout=Layout(shards=4), compute_bytes=4, training_micro_batches=1, inference_micro_batches=0,
        optimizer_steps=2, pushes=1,
    )  # fmt: skip
    assert traffic["reduce_scatter"] == 2 * 4 * 40 * 3 // 4
    assert traffic["weight_push_all_gather"] == 4 * 1040 * 3 // 4
    assert value_model(shape).adapter_parameters == 0  # a critic is trained whole


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "filled", "bubble"),
    [
        (1, 1, 6, 6, 0.0),
        (4, 1, 6, 6, 3 / 9),
        (4, 2, 6, 8, 3 / 19),  # filled up to a multiple of the stages
        (2, 1, 1, 1, 1 / 2),
    ],
)
def test_the_bubble_of_a_pipeline_by_hand(
    stages: int, chunks: int, micro_batches: int, filled: int, bubble: float
) -> None:
    values = {"strategy.pipeline_parallel_size": stages, "strategy.virtual_pipeline_size": chunks}
    found = pipeline_of_run(values, micro_batches)
    assert (found["stages"], found["chunks_per_stage"], found["micro_batches"]) == (stages, chunks, filled)
    assert found["bubble"] == pytest.approx(bubble, abs=1e-4)
    assert pipeline_of_run(values, None)["bubble"] is None
