"""The parity command on sequence-parallel layouts: right ones pass, and each kind of mistake is caught."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.cli import main
from lightning_rlhf.engines import sequence_parallel
from lightning_rlhf.engines.ulysses import UlyssesEngine
from lightning_rlhf.parity.run import TOLERANCE


def _parity(capfd: pytest.CaptureFixture[str], layout: str, model: str, *more: str) -> tuple[int, dict[str, Any]]:
    status = main.main(["parity", "--strategy", "ulysses_rl", "--layout", layout, "--model", model, "--json", *more])
    report: dict[str, Any] = json.loads(capfd.readouterr().out)
    return status, report


@pytest.mark.parametrize(
    ("layout", "model", "more"),
    [
        ("sp=2", "tiny-qwen3", ("--micro-batch-tokens", "41")),
        ("sp=2", "tiny-qwen3-moe", ()),
        ("dp_shard=2,sp=2", "tiny-qwen3-tied", ()),
        ("sp=4", "tiny-llama", ()),  # its 2 key-value heads are fewer than the ranks
    ],
)
def test_layouts_equal_one_process(
    capfd: pytest.CaptureFixture[str], layout: str, model: str, more: tuple[str, ...]
) -> None:
    status, report = _parity(capfd, layout, model, *more)
    assert status == 0, report
    assert (report["strategy"], report["layout"], report["first_divergence"]) == ("ulysses_rl", layout, None)
    assert all(0 <= difference <= TOLERANCE for difference in report["max_abs_diff"].values())
    assert report["max_abs_diff"]["log_probs"] > 0


def _caught(capfd: pytest.CaptureFixture[str]) -> tuple[dict[str, float], str]:
    status, report = _parity(capfd, "sp=2", "tiny-qwen3")
    assert status == 1
    return report["max_abs_diff"], report["first_divergence"]


def test_negative_control_a_missing_all_to_all(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_parallel, "exchange", lambda parts, group: parts.clone())
    differences, _ = _caught(capfd)
    assert differences["log_probs"] > 1e-2


def test_negative_control_an_all_reduce_in_the_gathers_backward(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sequence_parallel.own_slice

    def summed(values: Tensor, layout: sequence_parallel.SlicedLayout) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=layout.group)
        return right(values, layout)

    monkeypatch.setattr(sequence_parallel, "own_slice", summed)
    differences, _ = _caught(capfd)
    assert differences["log_probs"] <= TOLERANCE
    assert differences["grads"] > 1e-2


def test_negative_control_a_metric_summed_over_slices(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce = UlyssesEngine.train_batch

    def over_slices(self: UlyssesEngine, *args: Any, **kwargs: Any) -> dict[str, float]:
        with monkeypatch.context() as patch:
            patch.setattr(UlyssesEngine, "data_parallel_size", property(lambda engine: dist.get_world_size()))
            patch.setattr(UlyssesEngine, "data_parallel_group", property(lambda engine: dist.group.WORLD))
            return reduce(self, *args, **kwargs)

    monkeypatch.setattr(UlyssesEngine, "train_batch", over_slices)
    differences, first = _caught(capfd)
    assert first.startswith("loss: ")
    assert all(differences[quantity] <= TOLERANCE for quantity in ("log_probs", "grads", "params", "export"))
