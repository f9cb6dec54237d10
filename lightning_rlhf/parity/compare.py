"""Two sides' files, number by number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lightning_rlhf.parity.measure import in_batch_order
from lightning_rlhf.types import Experience

QUANTITIES = ("log_probs", "loss", "grads", "params", "export")
"""What must agree, in the order in which it is computed."""
TENSORS = ("grads", "params", "export")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Largest absolute differences between the layout and one process.

    Attributes:
        log_probs: by ``sequence <row>, token <index>``, in nats, before any step.
        loss: by metric, over the optimizer steps; ``loss`` and ``grad_norm`` are among them. What is above 1 (a
            ratio, a norm) is compared relative to itself.
        grads: by Hugging Face name, before clipping; ``clipped norm`` is the norm after it.
        params: by Hugging Face name, after the steps.
        export: by Hugging Face name, as streamed to a rollout engine.
        params_default_eps: as ``params``, from a second training with AdamW's default eps.
    """

    log_probs: dict[str, float]
    loss: dict[str, float]
    grads: dict[str, float]
    params: dict[str, float]
    export: dict[str, float]
    params_default_eps: dict[str, float]

    def largest(self) -> dict[str, float]:
        """The largest difference of each quantity; infinite where something is missing or not a number."""
        return {quantity: max(getattr(self, quantity).values(), default=math.inf) for quantity in QUANTITIES}

    def first_divergence(self, tolerance: float) -> str | None:
        """``<quantity>: <name>`` of what differs first: a parameter if there is one, else a token or a metric."""
        for quantity in (*TENSORS, "log_probs", "loss"):
            for name, difference in getattr(self, quantity).items():
                if not difference <= tolerance:
                    return f"{quantity}: {name}"
        return None


def compare(reference: Path, layout: Path, *, batch: Experience, world_size: int) -> Comparison:
    """Reads what ``measure`` wrote on both sides.

    Args:
        reference: folder of the one process.
        layout: folder of the layout's ranks.
        batch: the rows that both have trained on.
        world_size: ranks of the layout.
    """
    expected = _report(reference, 0)
    found = [_report(layout, rank) for rank in range(world_size)]
    tensors = {
        name: _tensor_differences(name, reference, layout, expected["tensors"][name], found[0]["tensors"][name])
        for name in (*TENSORS, "params_default_eps")
    }
    norm = expected["clipped_norm"]
    tensors["grads"]["clipped norm"] = max(_distance(report["clipped_norm"], norm) for report in found)
    metrics: dict[str, float] = {}
    for report in found:
        for name, difference in _metric_differences(expected["steps"], report["steps"]).items():
            metrics[name] = max(metrics.get(name, 0.0), difference)
    log_probs = _log_prob_differences(reference, layout, batch, expected, found)
    return Comparison(log_probs=log_probs, loss=metrics, **tensors)


def _report(folder: Path, rank: int) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8"))
    return report


def _distance(found: float, expected: float) -> float:
    """Absolute, relative to what is expected above 1; infinite if either is not finite."""
    difference = abs(found - expected) / max(1.0, abs(expected))
    return difference if math.isfinite(difference) else math.inf


def _metric_differences(expected: list[dict[str, float]], found: list[dict[str, float]]) -> dict[str, float]:
    """The largest difference of each metric over the steps; infinite for one that only one side has."""
    names = dict.fromkeys(name for step in (*expected, *found) for name in step)
    return {
        name: max(
            _distance(b.get(name, math.nan), a.get(name, math.nan)) if name in a or name in b else 0.0
            for a, b in zip(expected, found, strict=True)
        )
        for name in names
    }


def _tensor_differences(
    name: str, reference: Path, layout: Path, expected: Mapping[str, float], spreads: Mapping[str, float]
) -> dict[str, float]:
    """By tensor, in the reference's order: the distance to it, or between ranks if that is larger."""
    differences = {}
    with (
        safe_open(str(reference / f"{name}.safetensors"), "pt") as ours,
        safe_open(str(layout / f"{name}.safetensors"), "pt") as theirs,
    ):
        for key in dict.fromkeys((*expected, *spreads)):
            if key not in expected or key not in spreads:
                differences[f"{key} ({'missing' if key in expected else 'unexpected'})"] = math.inf
                continue
            a, b = ours.get_tensor(key), theirs.get_tensor(key)
            if a.shape != b.shape:
                differences[f"{key} (shape {list(b.shape)}, expected {list(a.shape)})"] = math.inf
                continue
            distance = float((a - b).abs().max()) if a.numel() else 0.0
            differences[key] = max(distance if math.isfinite(distance) else math.inf, spreads[key])
    return differences


def _log_prob_differences(
    reference: Path, layout: Path, batch: Experience, expected: Mapping[str, Any], found: list[dict[str, Any]]
) -> dict[str, float]:
    def read(folder: Path, rank: int, rows: list[int]) -> torch.Tensor:
        values = load_file(folder / f"rank_{rank}.safetensors")["log_probs"]
        return in_batch_order(batch, rows, values.float())

    ours = read(reference, 0, expected["rows"])
    worst = torch.full_like(ours, -1.0)  # of each token, over the ranks that hold it
    for rank, report in enumerate(found):
        difference = (read(layout, rank, report["rows"]) - ours).abs()
        holds = torch.isin(batch.sequence_ids, torch.tensor(report["rows"], dtype=torch.int64))
        difference = torch.where(difference.isnan(), torch.inf, difference)
        worst = torch.where(holds, torch.maximum(worst, difference), worst)
    worst = torch.where(worst < 0, torch.inf, worst)  # nobody holds it
    rows, places = batch.sequence_ids.tolist(), batch.position_ids.tolist()
    return {
        f"sequence {rows[token]}, token {places[token]}": float(worst[token])
        for token in range(batch.num_tokens)
        if batch.response_mask[token]
    }
