"""Sequence parallelism against one process: same data, same numbers, whatever the layout and the cut."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.experience import make_experience, policy_gradient
from support.fork import DistributedError, run_distributed
from support.tiny import tiny_model, write_tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineRegistry
from lightning_rlhf.engines import sequence_parallel
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.engines.ulysses import UlyssesEngine
from lightning_rlhf.metrics import Metric
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CPU = torch.device("cpu")
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
LENGTHS = [5, 30, 8, 17, 3, 40, 12, 10]
"""125 tokens: neither they nor most micro-batches divide by 2 or 4."""
TOLERANCE = 1e-5
AXES = ("dp_replicate", "dp_shard", "sp")
WIDE = 128
"""Hidden size of a model with 4 heads and 2 key-value heads; with 64 they are 2 and 1."""

Outcome = tuple[list[tuple[float, ...]], Tensor, dict[str, Tensor]]
"""Loss, gradient norm and a metric of each step; log-probs after it; the parameters at the end."""


def _config(*, hidden: int = WIDE, tied: bool = False, **kwargs: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": tiny_model(hidden=hidden, tied=tied), "optimizer": ADAMW, "max_grad_norm": 0.5, **kwargs}
    )


def _sliced(config: EngineConfig, *shape: int) -> UlyssesEngine:
    engine = UlyssesEngine(config, device=CPU, mesh=init_device_mesh("cpu", shape, mesh_dim_names=AXES))
    engine.initialize()
    return engine


def _alone(config: EngineConfig) -> TorchEngine:
    engine = TorchEngine(config, device=CPU)
    engine.initialize()
    return engine


def _loss(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    assert outputs.log_probs is not None
    scored = Metric.sum(outputs.log_probs[micro_batch.loss_mask])
    return LossOutput(terms=policy_gradient(outputs, micro_batch).terms, metrics={"sum_log_probs": scored})


def _train(engine: BaseEngine, data: Experience, whole: Experience) -> Outcome:
    seen = []
    for _ in range(2):
        metrics = engine.train_batch(data, _loss)
        seen.append((metrics["loss"], metrics["grad_norm"], metrics["sum_log_probs"]))
    log_probs = engine.infer_batch(whole, entropy=True)
    assert log_probs.log_probs is not None
    assert log_probs.entropy is not None
    parameters = {name: value.clone() for name, value in engine.get_per_tensor_param()}
    return seen, torch.stack([log_probs.log_probs, log_probs.entropy]), parameters


def _on_ranks(shape: tuple[int, int, int], kwargs: dict[str, Any]) -> Outcome:
    engine = _sliced(_config(**kwargs), *shape)
    assert engine.data_parallel_size == shape[0] * shape[1]
    assert engine.data_parallel_rank == dist.get_rank() // shape[2]
    assert engine.is_mp_src_rank_with_outputs() == (dist.get_rank() % shape[2] == 0)
    whole = make_experience(LENGTHS)
    return _train(engine, whole.select(_share(engine)), whole)


def _share(engine: BaseEngine) -> list[int]:
    everything = list(range(len(LENGTHS)))
    if engine.data_parallel_size == 1:
        return everything
    return [everything[:5], everything[5:]][engine.data_parallel_rank]


def _one_process(**kwargs: Any) -> Outcome:
    whole = make_experience(LENGTHS)
    return _train(_alone(_config(**kwargs)), whole, whole)


def _differences(found: Outcome, expected: Outcome) -> dict[str, float]:
    assert found[2].keys() == expected[2].keys()
    steps = list(zip(found[0], expected[0], strict=True))
    differences = {
        name: max(abs(mine[place] - theirs[place]) for mine, theirs in steps)
        for place, name in enumerate(("loss", "grad_norm", "metric"))
    }
    differences["metric"] /= abs(expected[0][0][2])  # a sum of over a hundred terms
    differences["outputs"] = float((found[1] - expected[1]).abs().max())
    differences["parameters"] = max(float((found[2][name] - value).abs().max()) for name, value in expected[2].items())
    return differences


def _assert_equal(found: Outcome, expected: Outcome) -> None:
    assert all(value < TOLERANCE for value in _differences(found, expected).values()), _differences(found, expected)


@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 3}, {"max_tokens_per_micro_batch": 48}], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("hidden", [64, WIDE], ids=["kv-below-sp", "kv-equal-sp"])
def test_two_slices_equal_one_process(hidden: int, tied: bool, cut: dict[str, int]) -> None:
    expected = _one_process(hidden=hidden, tied=tied)
    for found in run_distributed(_on_ranks, 2, (1, 1, 2), {"hidden": hidden, "tied": tied, **cut}):
        _assert_equal(found, expected)


@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 1}, {"max_tokens_per_micro_batch": 48}], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 2, 2), (2, 1, 2)], ids=str)
def test_four_ranks_equal_one_process(shape: tuple[int, int, int], cut: dict[str, int]) -> None:
    expected = _one_process(tied=True)
    for found in run_distributed(_on_ranks, 4, shape, {"tied": True, **cut}):
        _assert_equal(found, expected)


def test_without_a_second_rank_it_is_fsdp2() -> None:
    expected = _one_process()
    for found in run_distributed(_on_ranks, 2, (1, 2, 1), {}):
        _assert_equal(found, expected)


def test_nothing_warns_of_a_lost_hook() -> None:
    def run() -> None:
        engine = _sliced(_config(), 1, 1, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.forward_backward_batch(make_experience(LENGTHS), _loss)

    run_distributed(run, 2)


def test_activation_checkpointing_changes_nothing() -> None:
    expected = _one_process()
    for found in run_distributed(_on_ranks, 2, (1, 1, 2), {"gradient_checkpointing": True, "micro_batch_size": 3}):
        _assert_equal(found, expected)


def test_groups_without_rows_join_the_others() -> None:
    whole = make_experience([2, 1, 3])  # a slice of padding alone among them

    def run() -> list[tuple[float, ...]]:
        engine = _sliced(_config(hidden=64, micro_batch_size=1), 1, 2, 2)
        return _train(engine, whole.select([[0, 1, 2], []][engine.data_parallel_rank]), whole)[0]

    expected = _train(_alone(_config(hidden=64)), whole, whole)[0]
    for found in run_distributed(run, 4):
        assert found == [pytest.approx(step, abs=TOLERANCE) for step in expected]


def test_bf16_compute_is_near_fp32() -> None:
    expected = _one_process()
    for found in run_distributed(_on_ranks, 2, (1, 1, 2), {"compute_dtype": torch.bfloat16}):
        assert found[0][0][0] == pytest.approx(expected[0][0][0], abs=0.02)
        assert found[0][0][1] == pytest.approx(expected[0][0][1], rel=0.05)


def test_a_value_model_in_slices_equals_one_process() -> None:
    whole = make_experience(LENGTHS)

    def regression(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
        assert outputs.values is not None
        return LossOutput(terms=(outputs.values - micro_batch.advantages) ** 2)

    def train(engine: BaseEngine) -> tuple[list[float], Tensor, dict[str, Tensor]]:
        losses = [engine.train_batch(whole, regression)["loss"] for _ in range(3)]
        values = engine.infer_batch(whole).values
        assert values is not None
        return losses, values, {name: value.clone() for name, value in engine.get_per_tensor_param()}

    def run() -> tuple[list[float], Tensor, dict[str, Tensor]]:
        mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=AXES)
        engine = EngineRegistry.new("value_model", "ulysses", _config(micro_batch_size=3), device=CPU, mesh=mesh)
        engine.initialize()
        return train(engine)

    alone = EngineRegistry.new("value_model", "torch", _config(), device=CPU)
    alone.initialize()
    losses, values, parameters = train(alone)
    assert float(values.abs().max()) > 1e-3
    for found in run_distributed(run, 2):
        assert found[0] == pytest.approx(losses, abs=TOLERANCE)
        torch.testing.assert_close(found[1], values, atol=TOLERANCE, rtol=0)
        for name, value in parameters.items():
            torch.testing.assert_close(found[2][name], value, atol=TOLERANCE, rtol=0)


# --- negative controls: what the comparison above must catch ---------------------------------------------------------


def test_negative_control_a_missing_all_to_all_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # every shape stays right: each rank attends with tokens of its own in place of the others'
    monkeypatch.setattr(sequence_parallel, "exchange", lambda parts, group: parts.clone())
    expected = _one_process()
    for found in run_distributed(_on_ranks, 2, (1, 1, 2), {}):
        assert _differences(found, expected)["outputs"] > 1000 * TOLERANCE


def test_negative_control_an_all_reduce_in_the_gathers_backward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sequence_parallel.own_slice

    def summed(values: Tensor, layout: sequence_parallel.SlicedLayout) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=layout.group)
        return right(values, layout)

    monkeypatch.setattr(sequence_parallel, "own_slice", summed)
    expected = _one_process()
    for found in run_distributed(_on_ranks, 2, (1, 1, 2), {}):
        assert found[0][0][0] == pytest.approx(expected[0][0][0], abs=TOLERANCE)  # the loss does not show it
        assert found[0][0][1] == pytest.approx(2 * expected[0][0][1], rel=1e-4)


def test_negative_control_metrics_summed_over_slices_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UlyssesEngine, "data_parallel_group", property(lambda engine: dist.group.WORLD))
    monkeypatch.setattr(UlyssesEngine, "data_parallel_size", property(lambda engine: dist.get_world_size()))

    def run() -> Outcome:
        whole = make_experience(LENGTHS)
        return _train(_sliced(_config(), 1, 1, 2), whole, whole)

    expected = _one_process()
    for found in run_distributed(run, 2):
        assert found[0][0][0] == pytest.approx(2 * expected[0][0][0], rel=1e-4)
        assert found[0][0][1] == pytest.approx(expected[0][0][1], rel=1e-4)  # the gradient does not show it


# --- what is refused -------------------------------------------------------------------------------------------------


def test_ranks_of_a_group_with_different_rows_are_told_so() -> None:
    def run() -> None:
        _sliced(_config(), 1, 1, 2).infer_batch(make_experience([4, 4], seed=dist.get_rank()))

    with pytest.raises(DistributedError, match="sequence-parallel group were given different rows"):
        run_distributed(run, 2)


def test_g03_heads_that_cannot_be_dealt_out_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny", hidden=64)
    (directory / "model.safetensors").write_bytes(b"not read")

    def run(model: Any) -> str:
        mesh = init_device_mesh("cpu", (1, 1, 3), mesh_dim_names=AXES)
        config = EngineConfig(model=model, optimizer=ADAMW)
        engine = EngineRegistry.new("language_model", "ulysses", config, device=CPU, mesh=mesh)
        with pytest.raises(ValueError, match="sp_size") as caught:
            engine.initialize()
        return str(caught.value)

    for model in (directory, tiny_model(hidden=64)):
        for message in run_distributed(run, 3, model):
            assert message.startswith("sp_size=3 does not fit a model with 2 attention heads and 1 key-value heads")
            assert message.endswith("takes sp_size 1, 2.")


def test_a_mesh_with_other_axes_is_refused() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "sp"))
        UlyssesEngine(_config(), device=CPU, mesh=mesh)

    with pytest.raises(DistributedError, match=r"dp_replicate x dp_shard x sp, got axes \('dp_shard', 'sp'\)"):
        run_distributed(run, 2)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_f07_a_checkpoint_is_read_with_another_number_of_slices(tmp_path: Path) -> None:
    whole = make_experience(LENGTHS)

    def save() -> Outcome:
        engine = _sliced(_config(), 1, 1, 2)
        _train(engine, whole, whole)
        engine.save_checkpoint(tmp_path / "step")
        return _train(engine, whole, whole)

    def go_on(*shape: int) -> Outcome:
        engine = _sliced(_config(model=tiny_model(hidden=WIDE, seed=7)), *shape)
        engine.load_checkpoint(tmp_path / "step")
        return _train(engine, whole.select(_share(engine)), whole)

    expected = run_distributed(save, 2)[0]
    for shape in ((1, 1, 2), (1, 2, 2), (1, 2, 1)):
        for found in run_distributed(go_on, shape[1] * shape[2], *shape):
            _assert_equal(found, expected)
