"""What every engine must do: checks that any engine class can be run through.

Each check of ``CHECKS`` is called with a ``Subject`` and an empty folder that the ranks share, on every rank of the
engine's process group at once (or in one process without a group), and fails by an assertion. The numbers that it
expects come from a plain transformers model that sees one sequence at a time. To try an engine of your own::

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
    def test_contract(check: Check, tmp_path: Path) -> None:
        subject = Subject(model_type="language_model", make=lambda config: MyEngine(config, device=...))
        run_distributed(check, 2, subject, tmp_path)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from support.tiny import tiny_model
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForSequenceClassification

from engines.by_hand import (
    LENGTHS,
    MAX_GRAD_NORM,
    TOLERANCE,
    ByHand,
    Subject,
    assert_metrics,
    assert_outputs,
    assert_parameters,
    own_rows,
    whole_batch,
)
from lightning_rlhf.contracts.engine import BaseEngine

HOST = torch.device("cpu")
CUTS = ({}, {"micro_batch_size": 2}, {"max_tokens_per_micro_batch": 48})

Check: TypeAlias = Callable[[Subject, Path], None]


# --- the checks ------------------------------------------------------------------------------------------------------


def train_batch_is_the_sum_over_sequences(subject: Subject, folder: Path) -> None:
    """Loss, norm before clipping, learning rate and parameters, for any cut into micro-batches and shares."""
    for cut in CUTS:
        engine, by_hand = subject.engine(**cut), ByHand(subject.model_type)
        data = whole_batch().select(own_rows(engine))
        norms = []
        for _ in range(3):
            expected = by_hand.step(whole_batch())
            assert_metrics(engine.train_batch(data, subject.loss), expected)
            norms.append(expected["grad_norm"])
        assert max(norms) > MAX_GRAD_NORM, "no step clips, so clipping is not tried"
        assert_parameters(engine, by_hand)


def outputs_come_in_the_callers_order(subject: Subject, folder: Path) -> None:
    """B04: whatever the micro-batches; 0 where nothing is scored; entropy only if asked."""
    data, by_hand = whole_batch(), ByHand(subject.model_type)
    by_hand.step(data)
    for cut in CUTS[1:]:
        engine = subject.engine(**cut)
        mine = data.select(own_rows(engine))
        engine.train_batch(mine, subject.loss)
        found = engine.infer_batch(mine, entropy=True)
        assert_outputs(found, by_hand.infer(mine))
        for values in (found.log_probs, found.entropy, found.values):
            assert values is None or bool((values.cpu()[~mine.response_mask] == 0).all())
        assert engine.infer_batch(mine).entropy is None


def modes_set_the_model_and_put_it_back(subject: Subject, folder: Path) -> None:
    engine = subject.engine()
    for before in (False, True):
        engine.module.train(before)
        with engine.train_mode():
            assert engine.module.training
            assert torch.is_grad_enabled()
        assert engine.module.training is before
        with engine.eval_mode():
            assert not engine.module.training
            assert not torch.is_grad_enabled()
        assert engine.module.training is before
        with pytest.raises(KeyError), engine.train_mode():
            raise KeyError
        assert engine.module.training is before
        assert torch.is_grad_enabled()


def forward_only_leaves_gradients_alone(subject: Subject, folder: Path) -> None:
    engine = subject.engine()
    data = whole_batch().select(own_rows(engine))
    with engine.eval_mode():
        loss = engine.forward_backward_batch(data, subject.loss, forward_only=True)["loss"].compute()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    assert loss == pytest.approx(engine.forward_backward_batch(data, subject.loss)["loss"].compute(), abs=TOLERANCE)
    assert any(parameter.grad is not None for parameter in engine.module.parameters())
    engine.zero_grad()
    assert all(parameter.grad is None for parameter in engine.module.parameters())


def offloading_changes_no_number(subject: Subject, folder: Path) -> None:
    """To the host and back between steps. On the CPU both are one place: there, that ``to`` loses nothing."""
    engine, by_hand = subject.engine(), ByHand(subject.model_type)
    data = whole_batch().select(own_rows(engine))
    for _ in range(2):
        assert_metrics(engine.train_batch(data, subject.loss), by_hand.step(whole_batch()))
        engine.to(HOST)
        assert all(parameter.device == HOST for parameter in engine.module.parameters())
        assert_parameters(engine, by_hand)
        engine.to(engine.device, optimizer=False, grad=False)
        assert all(parameter.device.type == engine.device.type for parameter in engine.module.parameters())
        engine.to(engine.device, model=False)
    assert_metrics(engine.train_batch(data, subject.loss), by_hand.step(whole_batch()))
    assert_parameters(engine, by_hand)


def modes_bring_and_take_what_the_config_names(subject: Subject, folder: Path) -> None:
    """In order, once for modes in one another, also after an exception; and no number changes."""
    everything = (True, True, True)
    cases = [
        ({"offload_model": True, "offload_optimizer": True}, [("to the host", everything)]),
        ({"offload_optimizer": True}, [("to the host", (False, True, False))]),
        ({}, []),
    ]
    for settings, left in cases:
        engine, by_hand = subject.engine(**settings), ByHand(subject.model_type)
        moves = _recorded_moves(engine)
        data = whole_batch().select(own_rows(engine))
        to_train, to_score = ("to the device", everything), ("to the device", (True, False, True))
        for _ in range(2):
            assert_metrics(engine.train_batch(data, subject.loss), by_hand.step(whole_batch()))
        assert moves == [to_train, *left] * 2
        moves.clear()
        with engine.eval_mode():
            engine.infer_batch(data)  # has an eval_mode of its own
        assert moves == [to_score, to_score, *left]
        moves.clear()
        with pytest.raises(ZeroDivisionError), engine.eval_mode(), engine.train_mode():
            raise ZeroDivisionError
        assert moves == [to_score, to_train, *left]
        moves.clear()
        assert_parameters(engine, by_hand)
        assert moves == ([to_score, *left] if left else [])


def _recorded_moves(engine: BaseEngine) -> list[tuple[str, tuple[bool, bool, bool]]]:
    """What the engine's ``to`` is asked for from now on: where to, and which of model, optimizer and gradients."""
    moves: list[tuple[str, tuple[bool, bool, bool]]] = []
    to = engine.to

    def recorded(device: torch.device, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        # on a CPU both are one place: they differ as objects alone
        moves.append(("to the device" if device is engine.device else "to the host", (model, optimizer, grad)))
        to(device, model=model, optimizer=optimizer, grad=grad)

    vars(engine)["to"] = recorded
    return moves


def a_loaded_checkpoint_goes_on(subject: Subject, folder: Path) -> None:
    """Parameters, moments and learning rate, into an engine that started from other weights."""
    engine, by_hand = subject.engine(), ByHand(subject.model_type)
    data = whole_batch().select(own_rows(engine))
    for _ in range(2):
        engine.train_batch(data, subject.loss)
        by_hand.step(whole_batch())
    engine.save_checkpoint(folder / "checkpoint")
    again = subject.engine(model=tiny_model(seed=7))
    again.load_checkpoint(folder / "checkpoint")
    assert_parameters(again, by_hand)
    assert_metrics(again.train_batch(data, subject.loss), by_hand.step(whole_batch()))
    assert_parameters(again, by_hand)


def parameters_leave_whole_under_hugging_face_names(subject: Subject, folder: Path) -> None:
    for tied in (False, True):
        engine, model = subject.engine(model=tiny_model(tied=tied)), tiny_model(tied=tied)
        expected = dict(model.named_parameters())
        if subject.model_type == "value_model":
            config = model.config
            config.num_labels = 1
            classifier = Qwen3ForSequenceClassification(config)
            expected = {name: expected.get(name, torch.zeros(1, 64)) for name, _ in classifier.named_parameters()}
        found = []
        for name, value in engine.get_per_tensor_param():
            assert not isinstance(value, DTensor), f"{name} is a shard"
            assert not value.requires_grad
            assert value.dtype is torch.float32
            torch.testing.assert_close(value.cpu(), expected[name].detach(), atol=0, rtol=0)
            found.append(name)
        assert sorted(found) == sorted(expected), "each name once, and none besides"


def ranks_know_their_places(subject: Subject, folder: Path) -> None:
    """Every share is held by equally many ranks, one of which speaks for it; groups hold what they should."""
    engine = subject.engine()
    rank, size = engine.data_parallel_rank, engine.data_parallel_size
    rows, model = engine.data_parallel_group, engine.model_parallel_group
    assert 0 <= rank < size
    if not dist.is_initialized():
        assert (size, rows, model) == (1, None, None)
        assert engine.is_mp_src_rank_with_outputs()
        return
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (rank, engine.is_mp_src_rank_with_outputs()))
    speakers = [place for place, speaks in places if speaks]
    assert sorted(speakers) == list(range(size)), f"one speaker for each of {size} shares, got {speakers}"
    per_share = dist.get_world_size() // size
    assert all([place for place, _ in places].count(share) == per_share for share in range(size))
    if size > 1:
        assert rows is not None
        assert sorted(places[peer][0] for peer in dist.get_process_group_ranks(rows)) == list(range(size))
    if per_share > 1:
        assert model is not None
        assert [places[peer][0] for peer in dist.get_process_group_ranks(model)] == [rank] * per_share


def a_gradient_that_is_not_finite_moves_nothing(subject: Subject, folder: Path) -> None:
    """On one share alone: no rank steps, and the next step is what it would have been."""
    engine, by_hand = subject.engine(), ByHand(subject.model_type)
    data = whole_batch().select(own_rows(engine))
    assert_metrics(engine.train_batch(data, subject.loss), by_hand.step(whole_batch()))
    broken = whole_batch().select(own_rows(engine))
    if engine.data_parallel_rank == engine.data_parallel_size - 1:
        broken.advantages.fill_(torch.nan)
    metrics = engine.train_batch(broken, subject.loss)
    assert metrics["skipped_steps"] == 1.0
    assert not math.isfinite(metrics["grad_norm"])
    assert engine.last_step is not None
    assert not engine.last_step.stepped
    assert_parameters(engine, by_hand)
    assert_metrics(engine.train_batch(data, subject.loss), by_hand.step(whole_batch()))
    assert_parameters(engine, by_hand)


def a_rank_without_rows_joins_the_others(subject: Subject, folder: Path) -> None:
    """All rows are the first share's; in one share, a mini-batch without rows changes only what its decay does."""
    engine = subject.engine(micro_batch_size=3)
    everything = list(range(len(LENGTHS)))
    mine = whole_batch().select(everything if engine.data_parallel_rank == 0 else [])
    by_hand = ByHand(subject.model_type)
    assert_metrics(engine.train_batch(mine, subject.loss), by_hand.step(whole_batch()))
    assert_parameters(engine, by_hand)
    assert_outputs(engine.infer_batch(mine, entropy=True), by_hand.infer(mine) if len(mine) else {})
    empty = whole_batch().select([])
    metrics = engine.train_batch(empty, subject.loss)
    assert (metrics["loss"], metrics["grad_norm"], metrics["skipped_steps"]) == (0.0, 0.0, 0.0)
    outputs = engine.infer_batch(empty)
    scores = outputs.log_probs if subject.model_type == "language_model" else outputs.values
    assert scores is None or scores.shape == (0,)


def a_model_without_optimizer_scores_and_does_not_train(subject: Subject, folder: Path) -> None:
    engine = subject.engine(optimizer=None, lr_schedule=None)
    data = whole_batch().select(own_rows(engine))
    assert_outputs(engine.infer_batch(data, entropy=True), ByHand(subject.model_type).infer(data))
    assert engine.optimizer is None
    for train in (lambda: engine.train_batch(data, subject.loss), engine.optimizer_step):
        with pytest.raises(RuntimeError, match="no optimizer"):
            train()
    with pytest.raises(RuntimeError, match="no adapter"), engine.disable_adapter():
        pass


def all_checks(subject: Subject, folder: Path) -> None:
    """Every check, one after the other on the same ranks, which start once: an error's traceback names the check."""
    for name, check in CHECKS.items():
        (folder / name).mkdir(exist_ok=True)
        check(subject, folder / name)


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        train_batch_is_the_sum_over_sequences,
        outputs_come_in_the_callers_order,
        modes_set_the_model_and_put_it_back,
        forward_only_leaves_gradients_alone,
        offloading_changes_no_number,
        modes_bring_and_take_what_the_config_names,
        a_loaded_checkpoint_goes_on,
        parameters_leave_whole_under_hugging_face_names,
        ranks_know_their_places,
        a_gradient_that_is_not_finite_moves_nothing,
        a_rank_without_rows_joins_the_others,
        a_model_without_optimizer_scores_and_does_not_train,
    )
}
