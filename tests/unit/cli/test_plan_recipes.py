"""The recipes for real sizes fit the machines that they name, by `lightning-rlhf plan`, without network or weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.cli import main
from lightning_rlhf.cli.architectures import known_models, model_config
from lightning_rlhf.cli.model_shape import read_model_shape

GB = 1e9


def _arguments(experiment: str, folder: Path, *more: str) -> list[str]:
    return ["plan", "--json", f"experiment={experiment}", f"data.source.path={folder / 'prompts.jsonl'}", *more]


def _plan(capsys: pytest.CaptureFixture[str], folder: Path, experiment: str, *more: str) -> dict[str, Any]:
    status = main.main(_arguments(experiment, folder, *more))
    captured = capsys.readouterr()
    assert status == 0, captured.err
    plan: dict[str, Any] = json.loads(captured.out)
    return plan


# what the models' own pages say: billions of parameters, and without the embeddings
PUBLISHED = {
    "Qwen/Qwen3-0.6B": (0.60, 0.44),
    "Qwen/Qwen3-8B": (8.2, 6.95),
    "Qwen/Qwen3-32B": (32.8, 31.2),
    "Qwen/Qwen3-30B-A3B": (30.5, 29.9),
}


@pytest.mark.parametrize("model", list(PUBLISHED))
def test_sizes_are_those_that_are_published(model: str) -> None:
    shape = read_model_shape(model)
    whole, without_embeddings = PUBLISHED[model]
    assert shape.num_parameters / 1e9 == pytest.approx(whole, rel=0.01)
    embeddings = shape.vocab_size * shape.hidden_size
    twice = 1 if model_config(model).tie_word_embeddings else 2
    assert (shape.num_parameters - twice * embeddings) / 1e9 == pytest.approx(without_embeddings, rel=0.01)


def test_every_file_of_sizes_is_checked_and_an_unknown_model_is_still_refused() -> None:
    assert known_models() == sorted(PUBLISHED)
    with pytest.raises(ValueError, match=r"no readable config\.json"):
        read_model_shape("Qwen/Qwen3-0.7B")


@pytest.mark.parametrize(
    ("experiment", "axes", "gpu_bytes"),
    [
        ("grpo-qwen3_0.6b-1n1r-auto", {}, 80 * GB),
        ("grpo-qwen3_8b-1n8r-fsdp2_rl", {"dp_shard": 8, "dp_replicate": 1}, 141 * GB),
        ("grpo-qwen3_32b-4n8r-ulysses_rl", {"dp_shard": 4, "dp_replicate": 1, "sp": 8}, 141 * GB),
    ],
)
def test_a_recipe_fits_its_gpus(
    experiment: str, axes: dict[str, int], gpu_bytes: float, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = _plan(capsys, tmp_path, experiment)
    assert plan["processes"]["axes"] == axes
    assert plan["weight_pushes"]["that_nobody_reads"] == 0
    memory = plan["memory_per_rank"]
    assert 0.4 * gpu_bytes < memory["total"] < 0.9 * gpu_bytes, memory  # room for what is not estimated, and used well


def test_the_ulysses_recipe_lives_on_single_micro_batches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = "grpo-qwen3_32b-4n8r-ulysses_rl"
    assert _plan(capsys, tmp_path, recipe)["per_rank"]["micro_batches_per_mini_batch"] == 1
    several = _plan(capsys, tmp_path, recipe, "algorithm.micro_batch_size=2")
    assert several["memory_per_rank"]["total"] > 141 * GB
    # it is the published number of heads that is checked
    assert main.main(_arguments(recipe, tmp_path, "trainer.num_nodes=3", "strategy.sp_size=24")) == 2
    assert "does not fit a model with 64 attention heads" in capsys.readouterr().err


def test_the_megatron_recipe_uses_every_axis(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = "grpo-qwen3_30b_a3b-4n8r-megatron_rl"
    plan = _plan(capsys, tmp_path, recipe)
    assert plan["processes"] == {
        "world_size": 32, "data_parallel_size": 2, "axes": {"pp": 2, "dp": 2, "cp": 2, "tp": 4},
    }  # fmt: skip
    memory = plan["memory_per_rank"]
    assert 0.4 * 141 * GB < memory["total"] < 0.9 * 141 * GB, memory
    # 24 of 48 layers, 128 experts of three 2048 x 768 matrices over ep 8; the rest over tp 4
    experts = 24 * 128 * 3 * 2048 * 768 // 8
    attention = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048 + 2 * 128
    layer = attention + 128 * 2048 + 2 * 2048  # router, two norms
    dense = -(-(24 * layer + 151936 * 2048) // 4)
    assert memory["parameters"] == 2 * (experts + dense)
    assert memory["gradients"] == 4 * (experts + dense)
    # fp32 parameters and two moments: dense over dp x cp = 4, experts over the 16 / 8 ranks that hold the same ones
    assert memory["optimizer_state"] == 12 * (experts // 2 + -(-dense // 4))
    assert memory["rollout_weights"] == 2 * read_model_shape("Qwen/Qwen3-30B-A3B").num_parameters
    traffic = plan["communication_per_rl_step"]
    assert list(traffic) == ["tensor", "context", "expert", "pipeline", "gradients", "weight_push"]
    assert all(size > 0 for size in traffic.values()), traffic
    # bf16 weights of the whole model, less this rank's
    whole = read_model_shape("Qwen/Qwen3-30B-A3B").num_parameters
    assert traffic["weight_push"] == 2 * (whole - experts - dense) * plan["weight_pushes"]["per_rl_step"]
    # fp32 gradients scattered, bf16 parameters gathered: 3 of 4 parts of the dense ones, 1 of 2 of the experts
    steps = plan["rl_step"]["optimizer_steps"]
    assert traffic["gradients"] == steps * 6 * (dense * 3 // 4 + experts // 2)
    for wrong, message in (
        ("strategy.pipeline_parallel_size=5", "not a multiple"),
        ("strategy.expert_parallel_size=3", "not a multiple"),
        ("strategy.tensor_parallel_size=1", "sequence_parallel=True needs tensor_parallel_size above 1"),
    ):
        assert main.main(_arguments(recipe, tmp_path, wrong)) == 2
        assert message in capsys.readouterr().err
