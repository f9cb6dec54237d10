"""The sharded engine against one process: same data, same numbers, whatever the layout and the cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.experience import make_experience, policy_gradient
from support.fork import DistributedError, run_distributed
from support.sharded import (
    ADAMW,
    CPU,
    LENGTHS,
    TOLERANCE,
    UNEVEN,
    Outcome,
    difference,
    engine_config,
    on_ranks,
    one_process,
    sharded_engine,
    train,
)
from support.tiny import tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rlhf.contracts.engine import EngineConfig, EngineRegistry
from lightning_rlhf.engines import fsdp2
from lightning_rlhf.engines.fsdp2 import FSDP2Engine
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.metrics import Metric
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CUTS = [{}, {"micro_batch_size": 2}, {"max_tokens_per_micro_batch": 48}]


@pytest.mark.parametrize("rows", [UNEVEN, [[5, 0, 7, 6, 1, 2, 4, 3], []]], ids=["uneven", "one-empty"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_two_ranks_equal_one_process(tied: bool, cut: dict[str, int], rows: list[list[int]]) -> None:
    expected = one_process(tied=tied)
    start = dict(tiny_model(tied=tied).named_parameters())
    assert max(float((value - start[name].detach()).abs().max()) for name, value in expected[1].items()) > 1e-3
    for found in run_distributed(on_ranks, 2, rows, (), {"tied": tied, **cut}):
        assert difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4), (4, 1)], ids=str)
def test_four_ranks_equal_one_process(shape: tuple[int, ...]) -> None:
    expected = one_process(tied=True)
    rows = [[0, 1, 2], [3], [], [7, 6, 5, 4]]
    for found in run_distributed(on_ranks, 4, rows, shape, {"tied": True, "max_tokens_per_micro_batch": 48}):
        assert difference(found, expected) < TOLERANCE


def test_other_memory_settings_change_nothing() -> None:
    def run() -> list[Outcome]:
        data = make_experience(LENGTHS).select(UNEVEN[dist.get_rank()])
        config = engine_config(micro_batch_size=2)
        recomputing = engine_config(micro_batch_size=2, gradient_checkpointing=True)
        return [
            train(sharded_engine(config, reshard_after_forward=False), data),
            train(sharded_engine(recomputing), data),
            train(offloading(engine_config(micro_batch_size=2)), data),
        ]

    def offloading(config: EngineConfig) -> FSDP2Engine:
        engine = sharded_engine(config, cpu_offload=True)
        shards = engine.module._get_fsdp_state()._fsdp_param_group.fsdp_params  # type: ignore[operator, union-attr]
        assert all(shard.offload_to_cpu for shard in shards)
        engine.to(torch.device("meta"))  # what the policy keeps on the host is not moved
        assert not any(parameter.is_meta for parameter in engine.module.parameters())
        return engine

    expected = one_process()
    for outcomes in run_distributed(run, 2):
        for found in outcomes:
            assert difference(found, expected) < TOLERANCE


def test_negative_control_averaged_gradients_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2, "sum_gradients", lambda model: None)
    expected = one_process()
    for found in run_distributed(on_ranks, 2, UNEVEN, (), {}):
        assert found[0][0][0] == pytest.approx(expected[0][0][0], abs=TOLERANCE)  # the loss does not show it
        assert found[0][0][1] == pytest.approx(expected[0][0][1] / 2, rel=1e-4)
        assert difference(found, expected) > 100 * TOLERANCE


def test_a03_tokens_weigh_the_same_on_every_rank() -> None:
    def terms(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
        assert outputs.log_probs is not None
        # a ratio of exactly 1, whose gradient is that of the log-prob
        return LossOutput(terms=micro_batch.advantages * (outputs.log_probs - outputs.log_probs.detach()).exp())

    # valid tokens and mean losses: rank 0 (4, 1), (2, 5); rank 1 (1, 8), (1, 0): 22 over 8 tokens
    data = make_experience([6, 4, 3, 3])
    data.advantages[data.response_mask] = torch.tensor([1.0] * 4 + [5.0] * 2 + [8.0] + [0.0])
    alone = TorchEngine(engine_config(), device=CPU)
    alone.initialize()
    expected = alone.train_batch(data, terms)

    def run() -> list[dict[str, float]]:
        rows = [[0, 1], [2, 3]][dist.get_rank()]
        cuts = ({"micro_batch_size": 1}, {"micro_batch_size": 2})
        return [sharded_engine(engine_config(**cut)).train_batch(data.select(rows), terms) for cut in cuts]

    for metrics in run_distributed(run, 2):
        for found in metrics:
            assert found["loss"] == pytest.approx(2.75)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], abs=TOLERANCE)


def test_b01_ranks_agree_on_the_number_of_micro_batches() -> None:
    lengths = [[95] * 5, [20] * 5]
    whole = make_experience(lengths[0] + lengths[1])

    def run(rows: list[list[int]]) -> tuple[int, int, list[int], Outcome, Tensor]:
        engine = sharded_engine(engine_config(max_tokens_per_micro_batch=100))
        data = whole.select(rows[dist.get_rank()])
        sampled: list[int] = []
        forwards: list[int] = []
        engine.module.register_forward_hook(lambda *args: forwards.append(1))

        def loss(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
            sampled.extend(micro_batch.sample_indices)
            return policy_gradient(outputs, micro_batch)

        inferred = engine.infer_batch(data).log_probs
        assert inferred is not None
        num_inferred = len(forwards)
        engine.forward_backward_batch(data, loss)
        num_trained = len(forwards) - num_inferred
        engine.zero_grad()
        return num_inferred, num_trained, sampled, train(engine, data), inferred

    alone = TorchEngine(engine_config(), device=CPU)
    alone.initialize()
    log_probs = alone.infer_batch(whole).log_probs
    assert log_probs is not None
    expected = train(alone, whole)
    uneven = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    even = [[0, 1, 5, 6, 7], [2, 3, 4, 8, 9]]
    for rows, count in ((uneven, 5), (even, 4)):
        results = run_distributed(run, 2, rows, timeout=30)
        for rank, (num_inferred, num_trained, sampled, outcome, inferred) in enumerate(results):
            assert (num_inferred, num_trained) == (count, count)
            assert sorted(sampled) == sorted(rows[rank])
            assert difference(outcome, expected) < TOLERANCE
            places = torch.cat([torch.arange(whole.cu_seqlens[r], whole.cu_seqlens[r + 1]) for r in rows[rank]])
            torch.testing.assert_close(inferred, log_probs[places], atol=TOLERANCE, rtol=0)


def test_a_rank_that_cannot_cut_its_share_stops_all() -> None:
    def run() -> str:
        engine = sharded_engine(engine_config(max_tokens_per_micro_batch=20))
        data = make_experience([[10, 21], [10]][dist.get_rank()])
        with pytest.raises((ValueError, RuntimeError)) as caught:
            engine.infer_batch(data)
        return str(caught.value)

    first, second = run_distributed(run, 2, timeout=30)
    assert "Sequence 1 has 21 tokens" in first
    assert "Another data-parallel rank" in second


class _ReduceScatters(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def test_gradients_travel_once_however_many_micro_batches_there_are() -> None:
    def run() -> list[int]:
        counts = []
        for micro_batch_size in (1, 8):
            engine = sharded_engine(engine_config(micro_batch_size=micro_batch_size))
            data = make_experience(LENGTHS).select(UNEVEN[dist.get_rank()])
            with _ReduceScatters() as traffic:
                engine.forward_backward_batch(data, policy_gradient)
            counts.append(traffic.count)
        return counts

    # two layers and the root
    assert run_distributed(run, 2) == [[3, 3]] * 2


def test_metrics_are_joined_over_ranks() -> None:
    def loss(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
        values = micro_batch.advantages[micro_batch.loss_mask]
        return LossOutput(
            terms=outputs.log_probs * 0,
            metrics={"most": Metric.max(values), "least": Metric.min(values), "mean": Metric.mean(values)},
        )

    data = make_experience(LENGTHS)

    def run() -> dict[str, float]:
        return sharded_engine(engine_config(micro_batch_size=1)).train_batch(
            data.select([[0, 1, 2], []][dist.get_rank()]), loss
        )

    part = data.select([0, 1, 2])
    values = part.advantages[part.loss_mask]
    for metrics in run_distributed(run, 2):
        assert metrics["most"] == pytest.approx(float(values.max()))
        assert metrics["least"] == pytest.approx(float(values.min()))
        assert metrics["mean"] == pytest.approx(float(values.mean()))


def test_forwards_in_any_order_see_the_current_weights() -> None:
    data = make_experience(LENGTHS)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        engine = sharded_engine(engine_config(tied=True))
        mine = data.select(UNEVEN[dist.get_rank()])
        engine.infer_batch(mine)
        engine.forward_backward_batch(mine, policy_gradient)
        engine.infer_batch(mine)
        assert all(isinstance(parameter, DTensor) for parameter in engine.module.parameters())
        engine.optimizer_step()
        exported = dict(engine.get_per_tensor_param())["model.embed_tokens.weight"]
        log_probs = engine.infer_batch(mine).log_probs
        assert log_probs is not None
        return exported, log_probs, mine.tokens

    alone = TorchEngine(engine_config(tied=True), device=CPU)
    alone.initialize()
    alone.forward_backward_batch(data, policy_gradient)
    alone.optimizer_step()
    expected = dict(alone.get_per_tensor_param())["model.embed_tokens.weight"]
    for rank, (exported, log_probs, _) in enumerate(run_distributed(run, 2)):
        torch.testing.assert_close(exported, expected, atol=TOLERANCE, rtol=0)
        scored = alone.infer_batch(data.select(UNEVEN[rank])).log_probs
        torch.testing.assert_close(log_probs, scored, atol=TOLERANCE, rtol=0)


def test_a_broken_gradient_on_one_rank_skips_the_step_on_all() -> None:
    data = make_experience(LENGTHS)

    def run() -> tuple[bool, bool]:
        engine = sharded_engine(engine_config())
        before = {name: value.clone() for name, value in engine.get_per_tensor_param()}
        mine = data.select(UNEVEN[dist.get_rank()])
        if dist.get_rank() == 1:
            mine.advantages.fill_(torch.nan)
        engine.forward_backward_batch(mine, policy_gradient)
        stepped = engine.optimizer_step().stepped
        return stepped, all(torch.equal(value, before[name]) for name, value in engine.get_per_tensor_param())

    assert run_distributed(run, 2) == [(False, True)] * 2


def test_bf16_compute_keeps_fp32_shards_and_log_probs() -> None:
    data = make_experience(LENGTHS)
    exact = TorchEngine(engine_config(), device=CPU)
    exact.initialize()
    expected = exact.train_batch(data, policy_gradient)

    def run() -> dict[str, float]:
        engine = sharded_engine(engine_config(compute_dtype=torch.bfloat16, micro_batch_size=2))
        mine = data.select(UNEVEN[dist.get_rank()])
        log_probs = engine.infer_batch(mine).log_probs
        assert log_probs is not None
        assert log_probs.dtype is torch.float32
        metrics = engine.train_batch(mine, policy_gradient)
        assert {value.dtype for _, value in engine.get_per_tensor_param()} == {torch.float32}
        assert {state["exp_avg"].dtype for state in engine.optimizer.state.values()} == {torch.float32}
        return metrics

    for metrics in run_distributed(run, 2):
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=0.02)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
        assert metrics["grad_norm"] != expected["grad_norm"]


def test_replicas_of_the_torch_engine_equal_one_process() -> None:
    def run() -> Outcome:
        # replicas that start apart take the first one's parameters
        config = engine_config(seed=dist.get_rank(), max_tokens_per_micro_batch=48)
        engine = TorchEngine(config, device=CPU, process_group=dist.group.WORLD)
        engine.initialize()
        return train(engine, make_experience(LENGTHS).select(UNEVEN[dist.get_rank()]))

    expected = one_process()
    for found in run_distributed(run, 2):
        assert difference(found, expected) < TOLERANCE


def test_the_registry_builds_it_and_a_sharded_module_is_not_taken_twice() -> None:
    def run() -> str:
        model = tiny_model()
        mesh = init_device_mesh("cpu", (2,))
        config = EngineConfig(model=model, optimizer=ADAMW)
        engine = EngineRegistry.new("language_model", "fsdp2", config, device=CPU, mesh=mesh)
        engine.initialize()
        frozen = EngineRegistry.new("language_model", "fsdp2", EngineConfig(model=model), device=CPU, mesh=mesh)
        with pytest.raises(ValueError, match="sharded by another engine") as caught:
            frozen.initialize()
        return str(caught.value)

    assert all("copy.deepcopy" in message for message in run_distributed(run, 2))


def test_a_mesh_of_three_axes_is_refused() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
        FSDP2Engine(engine_config(), device=CPU, mesh=mesh)

    with pytest.raises(DistributedError, match=r"dp_replicate x dp_shard, got axes \('a', 'b', 'c'\)"):
        run_distributed(run, 2)
