from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightning_rlhf.metric_names import METRICS, as_markdown, describe
from lightning_rlhf.metrics import Metric, compute_metrics, merge_metrics


def test_each_name_stands_once_with_meaning_and_unit() -> None:
    names = [row.name for row in METRICS]
    assert len(set(names)) == len(names)
    for row in METRICS:
        assert row.meaning
        assert row.unit
        assert re.fullmatch(r"[a-z_]+(/[a-z_<>]+)*", row.name), row.name


def test_a_pattern_takes_what_it_stands_for_and_no_more() -> None:
    assert describe("reward/mean").unit == "reward"
    assert describe("reward/digit_reward").name == "reward/<component>"
    assert describe("reward/digit_reward/failed").name == "reward/<component>/failed"
    for unknown in ("actor/nonsense", "rewards/mean", "reward/a/b", "loss", "time/nap"):
        with pytest.raises(KeyError, match="add a row"):
            describe(unknown)


def test_the_page_is_the_table(pytestconfig: pytest.Config) -> None:
    page = (Path(pytestconfig.rootpath) / "docs" / "metrics.md").read_text()
    assert page == as_markdown(), "python -m lightning_rlhf.metric_names > docs/metrics.md"


def test_i02_minima_and_maxima_are_not_averaged_or_rescaled() -> None:
    parts = [
        {"low": Metric.min(torch.tensor([0.8, 0.9])), "high": Metric.max(torch.tensor([1.2, 1.0]))},
        {"low": Metric.min(torch.tensor([0.85])), "high": Metric.max(torch.tensor([1.1]))},
    ]
    assert compute_metrics(merge_metrics(parts)) == pytest.approx({"low": 0.8, "high": 1.2})


def test_i03_a_nan_observation_is_left_out_and_a_nan_loss_shows() -> None:
    values = torch.tensor([0.5, float("nan"), 0.6, float("nan"), 0.7])
    nothing = torch.tensor([float("nan")])
    found = compute_metrics(
        {
            "mean": Metric.mean(values),
            "min": Metric.min(values),
            "max": Metric.max(values),
            "none": Metric.mean(nothing),
            "none_min": Metric.min(nothing),
            "loss": Metric.sum(values),
            "step_loss": Metric.of(nothing[0]),
        }
    )
    assert found["mean"] == pytest.approx(0.6)
    assert (found["min"], found["max"]) == pytest.approx((0.5, 0.7))
    assert "none" not in found
    assert "none_min" not in found
    assert found["loss"] != found["loss"]
    assert found["step_loss"] != found["step_loss"]
