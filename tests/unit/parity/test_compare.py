"""The comparison on files made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_rlhf.parity.batch import LENGTHS, make_batch, rows_of_rank
from lightning_rlhf.parity.compare import Comparison, compare
from lightning_rlhf.parity.run import ParityReport

BATCH = make_batch(96)
NAMES = ("grads", "params", "export", "params_default_eps")
TENSORS = {
    "b.weight": torch.tensor([1.0, 2.0]),
    "a.weight": torch.tensor([3.0]),
}  # not the alphabet's order


def _write(
    folder: Path,
    world: int,
    *,
    tensors: dict[str, dict[str, Tensor]] | None = None,
    spreads: dict[str, float] | None = None,
    steps: list[dict[str, float]] | None = None,
    clipped_norm: float = 0.5,
    shift: dict[int, float] | None = None,
) -> Path:
    """``shift``: added to the last log-prob of each rank named."""
    folder.mkdir()
    for name in NAMES:
        save_file((tensors or {}).get(name, TENSORS), folder / f"{name}.safetensors")
    starts = BATCH.cu_seqlens.tolist()
    for rank in range(world):
        rows = rows_of_rank(rank, world)
        values = torch.cat([torch.arange(starts[row], starts[row + 1]).float() for row in rows])
        values[-1] += (shift or {}).get(rank, 0.0)
        save_file({"log_probs": values}, folder / f"rank_{rank}.safetensors")
        held = {
            name: {key: (spreads or {}).get(key, 0.0) for key in (tensors or {}).get(name, TENSORS)} for name in NAMES
        }
        report: dict[str, Any] = {
            "rows": rows,
            "steps": steps or [{"loss": 1.0, "ratio_max": 4.0}],
            "clipped_norm": clipped_norm,
            "tensors": held,
        }
        (folder / f"rank_{rank}.json").write_text(json.dumps(report))
    return folder


def _compare(tmp_path: Path, **kwargs: Any) -> Comparison:
    reference = _write(tmp_path / "reference", 1)
    return compare(reference, _write(tmp_path / "layout", 2, **kwargs), batch=BATCH, world_size=2)


def test_equal_sides_differ_by_nothing(tmp_path: Path) -> None:
    found = _compare(tmp_path)
    assert set(found.largest().values()) == {0.0}
    assert found.first_divergence(0.0) is None
    assert len(found.log_probs) == int(BATCH.response_mask.sum())


def test_the_first_parameter_is_that_of_the_models_order(tmp_path: Path) -> None:
    changed = {"b.weight": torch.tensor([1.0, 2.25]), "a.weight": torch.tensor([3.5])}
    found = _compare(tmp_path, tensors={"params": changed})
    assert found.largest()["params"] == 0.5
    assert found.first_divergence(0.1) == "params: b.weight"
    assert found.first_divergence(0.3) == "params: a.weight"
    assert found.first_divergence(0.5) is None


def test_a_missing_an_unexpected_and_a_misshapen_tensor_differ_without_bound(tmp_path: Path) -> None:
    changed = {"b.weight": torch.ones(3), "c.weight": torch.ones(1)}
    found = _compare(tmp_path, tensors={"export": changed})
    assert found.export == {
        "b.weight (shape [3], expected [2])": math.inf,
        "a.weight (missing)": math.inf,
        "c.weight (unexpected)": math.inf,
    }
    report = ParityReport(
        strategy="s", layout={"a": 2, "b": 1}, comparison=found, tolerance=1e-5, device_type="cpu", seconds=1.0
    )
    encoded = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert encoded == {
        "strategy": "s",
        "layout": "a=2,b=1",
        "max_abs_diff": {"log_probs": 0.0, "loss": 0.0, "grads": 0.0, "params": 0.0, "export": None},
        "first_divergence": "export: b.weight (shape [3], expected [2])",
        "seconds": 1.0,
    }


def test_not_a_number_is_a_divergence(tmp_path: Path) -> None:
    changed = {**TENSORS, "a.weight": torch.tensor([math.nan])}
    found = _compare(
        tmp_path, tensors={"grads": changed}, steps=[{"loss": math.nan, "ratio_max": 4.0}], shift={0: math.nan}
    )
    assert found.grads["a.weight"] == math.inf
    assert found.loss == {"loss": math.inf, "ratio_max": 0.0}
    assert found.largest()["log_probs"] == math.inf


def test_replicas_that_drift_apart_are_a_divergence(tmp_path: Path) -> None:
    assert _compare(tmp_path, spreads={"a.weight": 0.75}).first_divergence(0.5) == "grads: a.weight"


def test_every_rank_that_holds_a_token_is_compared(tmp_path: Path) -> None:
    found = _compare(tmp_path, shift={1: 0.5})
    last = rows_of_rank(1, 2)[-1]
    assert {name: value for name, value in found.log_probs.items() if value} == {
        f"sequence {last}, token {LENGTHS[last] - 1}": 0.5
    }
    assert found.first_divergence(0.1) == f"log_probs: sequence {last}, token {LENGTHS[last] - 1}"


def test_metrics_above_one_are_relative_and_absent_ones_count(tmp_path: Path) -> None:
    found = _compare(tmp_path, steps=[{"loss": 1.5, "ratio_max": 5.0, "new": 1.0}], clipped_norm=0.25)
    assert found.loss == {"loss": 0.5, "ratio_max": 0.25, "new": math.inf}
    assert found.grads["clipped norm"] == 0.25


def test_a_row_that_no_rank_holds_is_a_divergence(tmp_path: Path) -> None:
    reference = _write(tmp_path / "reference", 1)
    layout = _write(tmp_path / "layout", 2)
    found = compare(reference, layout, batch=BATCH, world_size=1)
    assert found.largest()["log_probs"] == math.inf
