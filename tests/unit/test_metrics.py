"""Metrics joined over micro-batches and ranks."""

from __future__ import annotations

import math

import pytest
import torch
from support.fork import run_distributed

from lightning_rlhf.metrics import Metric, merge_metrics, reduce_metrics

NAN = math.nan


def _values(parts: list[dict[str, Metric]]) -> dict[str, float]:
    return reduce_metrics(merge_metrics(parts))


@pytest.mark.parametrize("split", [[[1.0, 2.0, 3.0, 6.0]], [[1.0, 2.0], [3.0, 6.0]], [[1.0], [2.0], [3.0], [6.0]]])
def test_i01_a_mean_does_not_depend_on_the_number_of_micro_batches(split: list[list[float]]) -> None:
    parts = [{"loss": Metric.mean(torch.tensor(values))} for values in split]
    assert _values(parts) == {"loss": 3.0}


def test_i01_a_mean_weighs_uneven_micro_batches_by_their_tokens() -> None:
    parts = [{"loss": Metric.mean(torch.tensor(values))} for values in ([1.0, 2.0, 3.0], [6.0])]
    assert _values(parts) == {"loss": 3.0}


def test_i02_min_and_max_stay_extremes() -> None:
    parts = [
        {"low": Metric.min(torch.tensor([0.8, 0.9])), "high": Metric.max(torch.tensor([1.2, 1.0]))},
        {"low": Metric.min(torch.tensor([0.85])), "high": Metric.max(torch.tensor([1.1]))},
    ]
    assert _values(parts) == pytest.approx({"low": 0.8, "high": 1.2})


def test_i03_nan_is_left_out_of_a_mean_and_its_count() -> None:
    assert _values([{"x": Metric.mean(torch.tensor([0.5, NAN, 0.6, NAN, 0.7]))}]) == pytest.approx({"x": 0.6})


def test_i03_all_nan_leaves_the_key_out() -> None:
    assert _values([{"x": Metric.mean(torch.tensor([NAN, NAN]))}, {"x": Metric.mean(torch.tensor([NAN]))}]) == {}


def test_i03_a_nan_loss_is_still_shown() -> None:
    assert math.isnan(_values([{"loss": Metric.sum(torch.tensor([1.0, NAN]))}])["loss"])


def test_an_empty_micro_batch_changes_nothing() -> None:
    empty, mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    full = {
        "m": Metric.mean(torch.tensor([2.0])),
        "low": Metric.min(torch.tensor([2.0])),
        "n": Metric.sum(torch.ones(3)),
    }
    none = {"m": Metric.mean(empty, mask), "low": Metric.min(empty, mask), "n": Metric.sum(empty)}
    assert _values([none, full, none]) == {"m": 2.0, "low": 2.0, "n": 3.0}


def test_different_reductions_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="'sum'"):
        merge_metrics([{"x": Metric.sum(torch.ones(1))}, {"x": Metric.mean(torch.ones(1))}])


def _rank_metrics(values: list[list[float]]) -> dict[str, float]:
    mine = torch.tensor(values[torch.distributed.get_rank()])
    metrics = {"mean": Metric.mean(mine), "low": Metric.min(mine), "high": Metric.max(mine), "sum": Metric.sum(mine)}
    return reduce_metrics(metrics, distributed=True)


def test_ranks_join_like_micro_batches() -> None:
    # the second rank saw nothing: its neutral elements must not show
    for result in run_distributed(_rank_metrics, 3, [[0.8, 1.2, 4.0], [], [-3.0]]):
        assert result == pytest.approx({"mean": 0.75, "low": -3.0, "high": 4.0, "sum": 3.0})


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_a_mask_of_any_dtype_leaves_values_out(dtype: torch.dtype) -> None:
    values, mask = torch.tensor([1.0, 2.0, 6.0, 100.0]), torch.tensor([1, 0, 1, 0], dtype=dtype)
    assert Metric.mean(values, mask).compute() == 3.5
    assert Metric.max(values, mask).compute() == 6.0
