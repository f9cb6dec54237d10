"""Curves over RL steps as PNG: figures without pyplot, so that no state is global and no display is looked for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = 5
"""Steps of a running mean."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Each value's mean with those before it, at most ``window`` of them; NaN counts as absent."""
    means = []
    for end in range(1, len(values) + 1):
        seen = [value for value in values[max(0, end - window) : end] if not math.isnan(value)]
        means.append(statistics.fmean(seen) if seen else math.nan)
    return means


def draw_curve(axes: Any, curve: Mapping[int, float], *, color: str, label: str | None = None) -> None:
    """One run's values, pale, and their running mean on top.

    Args:
        axes: of matplotlib.
        curve: by RL step.
        color: of both lines.
        label: for a legend; None: the two lines say what they are.
    """
    steps = sorted(curve)
    values = [curve[step] for step in steps]
    axes.plot(steps, values, color=color, alpha=0.35, marker=".", label="each step" if label is None else None)
    mean_label = f"mean of the last {WINDOW} steps" if label is None else label
    axes.plot(steps, running_mean(values), color=color, linewidth=2, label=mean_label)


def finish_axes(axes: Any, *, ylabel: str, title: str | None = None) -> None:
    """Names and grid that all panels share."""
    axes.set_xlabel("RL step")
    axes.set_ylabel(ylabel)
    if title is not None:
        axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the PNG beside ``path`` and renames it, so that a viewer never sees half of one."""
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png")
    part.replace(path)
