"""The sync protocol: its order, its receipt, and what a failure leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.contracts.rollout import RolloutEngine, TensorRows
from lightning_rlhf.types import Experience, ModelOutputs
from lightning_rlhf.weights import CheckpointEngineManager, NaiveCheckpointEngine
from lightning_rlhf.weights.receipt import check_read_back, sample_elements, sample_rows

EVENTS: list[str] = []


class TinyTrainer:
    """The two methods of an engine that a sync calls; a token's log-prob is minus its weight."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.weights = {f"layer.{i}": torch.full((4, 4), float(i + 1)) for i in range(3)}
        self.drained = 0

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            self.drained += 1
            yield name, tensor

    def infer_batch(self, data: Experience, *, entropy: bool = False) -> ModelOutputs:
        EVENTS.append("probe")
        return ModelOutputs(log_probs=-self.weights["layer.0"][0, 0] * data.tokens)


class TinyRollout(RolloutEngine):
    """Records the protocol, and can be told to go wrong in one place."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.gate: threading.Event | None = None
        self.weights: dict[str, Tensor] = {}
        self.cache: dict[tuple[int, ...], list[float]] = {}

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self.gate is not None:
            assert self.gate.wait(10)
        EVENTS.append("load")
        assert self.weight_version is None  # out of service while its weights are mixed
        for name, tensor in named_tensors:
            if self.fault == "load" and name == "layer.1":
                raise RuntimeError("the engine's disk is full")
            if self.fault == f"stale {name}" and name in self.weights:
                continue
            self.weights[name] = tensor.bfloat16() if self.fault == "bf16" else tensor.clone()

    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        EVENTS.append("score")
        key = tuple(token_ids[0])
        if key not in self.cache:
            self.cache[key] = [0.0, *(-float(self.weights["layer.0"][0, 0]) * token for token in key[1:])]
        return [self.cache[key]]

    def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        # layer.0 is packed by the engine and cannot be read back
        return {name: self.weights[name] for name in names if name != "layer.0"}

    def reset_prefix_cache(self) -> None:
        EVENTS.append("reset")
        if self.fault != "cache":
            self.cache.clear()

    def pause(self) -> None:
        EVENTS.append("pause")

    def resume(self) -> None:
        EVENTS.append("resume")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        EVENTS.append(f"wake {','.join(tags or ())}")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a sync samples nothing")

    abort = sleep = release_kv_cache = shutdown = generate


def _manager(trainer: TinyTrainer, rollout: TinyRollout) -> CheckpointEngineManager:
    EVENTS.clear()
    engine: Any = trainer
    assert not isinstance(engine, BaseEngine)
    return CheckpointEngineManager(
        engine=engine,
        rollout=rollout,
        checkpoint_engine=NaiveCheckpointEngine(),
        probe_token_ids=[3, 1, 2],
        probe_tolerance=1e-3,
    )


def test_the_protocol_in_its_order() -> None:
    trainer, rollout = TinyTrainer(), TinyRollout()
    receipt = _manager(trainer, rollout).update_weights(7)
    assert EVENTS == ["pause", "wake weights", "load", "reset", "wake kv_cache", "resume", "probe", "score"]
    assert rollout.weight_version == receipt.version == 7
    assert receipt.probe_difference == 0.0
    assert receipt.tensors_compared == 2


def test_replicas_take_a_copy_while_the_trainer_goes_on() -> None:
    trainer, rollout = TinyTrainer(), TinyRollout()
    manager = _manager(trainer, rollout)
    rollout.gate = threading.Event()
    update = manager.start_update(7)
    assert EVENTS == ["probe", "pause", "wake weights"]  # it stands still, with the old weights
    trainer.weights["layer.0"] += 1.0
    trainer.weights["layer.2"] += 1.0
    assert rollout.weight_version is None
    rollout.gate.set()
    receipt = manager.finish_update(update)
    assert EVENTS[3:] == ["load", "reset", "wake kv_cache", "resume", "score"]
    assert rollout.weight_version == receipt.version == 7
    assert (receipt.probe_difference, receipt.tensors_compared, receipt.unchanged) == (0.0, 2, False)
    assert rollout.weights["layer.0"].eq(1).all()
    assert rollout.weights["layer.2"].eq(3).all()
    assert manager.finish_update(manager.start_update(8)).version == 8
    assert rollout.weights["layer.2"].eq(4).all()


@pytest.mark.parametrize(
    ("fault", "message"),
    [("load", "disk is full"), ("stale layer.2", r"layer\.2 .* differs"), ("stale layer.0", "2 nats on the probe")],
)
def test_what_goes_wrong_meanwhile_is_raised_at_the_end(fault: str, message: str) -> None:
    trainer, rollout = TinyTrainer(), TinyRollout()
    manager = _manager(trainer, rollout)
    manager.update_weights(0)
    for name in trainer.weights:
        trainer.weights[name] += 1.0
    rollout.fault = fault
    update = manager.start_update(1)
    with pytest.raises(RuntimeError, match=message):
        manager.finish_update(update)
    assert rollout.weight_version is None
    rollout.fault = ""
    assert manager.update_weights(2).version == 2


def test_ensure_fresh_pushes_only_when_the_versions_differ() -> None:
    manager = _manager(TinyTrainer(), TinyRollout())
    assert manager.ensure_fresh(0) is not None
    assert manager.ensure_fresh(0) is None
    assert manager.ensure_fresh(1) is not None
    assert manager.num_pushes == 2


def test_unchanged_weights_are_noted() -> None:
    trainer = TinyTrainer()
    manager = _manager(trainer, TinyRollout())
    assert [manager.update_weights(v).unchanged for v in (0, 1)] == [False, True]
    trainer.weights["layer.2"] += 0.25
    assert manager.update_weights(2).unchanged is False


def test_d04_a_tensor_that_was_not_loaded_is_named() -> None:
    trainer, rollout = TinyTrainer(), TinyRollout(fault="stale layer.2")
    manager = _manager(trainer, rollout)
    manager.update_weights(0)
    trainer.weights["layer.2"] += 1.0
    with pytest.raises(RuntimeError, match=r"version 1: layer\.2 .* differs .* up to 1"):
        manager.update_weights(1)
    assert rollout.weight_version is None


def test_d04_a_stale_tensor_that_cannot_be_read_back_fails_the_probe() -> None:
    trainer, rollout = TinyTrainer(), TinyRollout(fault="stale layer.0")
    manager = _manager(trainer, rollout)
    manager.update_weights(0)
    trainer.weights["layer.0"] += 1.0
    with pytest.raises(RuntimeError, match=r"differ by 2 nats on the probe"):
        manager.update_weights(1)
    assert rollout.weight_version is None


def test_d05_a_cache_that_old_weights_filled_fails_the_probe() -> None:
    trainer, rollout = TinyTrainer(), TinyRollout(fault="cache")
    manager = _manager(trainer, rollout)
    manager.update_weights(0)
    trainer.weights["layer.0"] += 9.0
    with pytest.raises(RuntimeError, match="prefix cache"):
        manager.update_weights(1)


def test_a_failed_load_leaves_the_engine_out_of_service_and_the_stream_drained() -> None:
    trainer, rollout = TinyTrainer(), TinyRollout(fault="load")
    rollout.weight_version = 4
    with pytest.raises(RuntimeError, match="disk is full"):
        _manager(trainer, rollout).update_weights(5)
    assert rollout.weight_version is None
    assert trainer.drained == 3  # other ranks wait in the gather of every tensor


def test_a_half_precision_engine_is_compared_in_its_own_dtype() -> None:
    trainer = TinyTrainer()
    trainer.weights["layer.1"] += 1 / 3
    assert _manager(trainer, TinyRollout(fault="bf16")).update_weights(0).tensors_compared == 2


def test_samples_cover_a_tensor_from_end_to_end() -> None:
    samples = sample_elements(torch.arange(1000.0))
    assert (len(samples), samples[0], samples[-1]) == (64, 0.0, 999.0)
    assert sample_elements(torch.tensor(3.0)).tolist() == [3.0]
    assert sample_elements(torch.zeros(0, 5)).tolist() == []


def test_the_rows_of_each_rank_have_their_part_of_the_samples() -> None:
    whole = torch.arange(1000.0).reshape(250, 4)
    samples = sample_elements(whole)
    for first, end in ((0, 100), (100, 250)):
        values, place = sample_rows(TensorRows(rows=whole[first:end], first=first, num_rows=250))
        own = [value for value in samples.tolist() if 4 * first <= value < 4 * end]
        assert values.tolist() == own
        assert samples[place].item() == own[0]
        assert check_read_back({"w": samples}, {"w": (values, place)}, version=1, where="here") == 1
        with pytest.raises(RuntimeError, match=r"w in the rollout engine .* by up to 0.5"):
            check_read_back({"w": samples}, {"w": (values + 0.5, place)}, version=1, where="here")
    between = TensorRows(rows=whole[1:3], first=1, num_rows=250)  # elements 4 to 11; sampled are 0, 16, 32, ...
    assert sample_rows(between)[0].tolist() == []


def test_unknown_checkpoint_engines_are_refused_with_those_there_are() -> None:
    with pytest.raises(KeyError, match=r"No checkpoint engine .nave.\. Registered: .*naive"):
        CheckpointEngineRegistry.new("nave")


def test_the_naive_engine_has_nothing_to_receive_before_a_send() -> None:
    with pytest.raises(RuntimeError, match="before send_weights"):
        next(NaiveCheckpointEngine().receive_weights())
