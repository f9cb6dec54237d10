"""The command ``lightning-rlhf plot``: the curves of one run, or of several over each other, as PNG."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.callbacks.curves import draw_curve, finish_axes, new_figure, save_figure
from lightning_rlhf.cli.run_records import History, RecordError, read_history

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFUSED = 2
"""Exit status if there is nothing to plot."""
_COLUMNS = 3
_TIMES_NOT_PARTS = ("time/step",)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture of the figure.

    Attributes:
        title: above it.
        unit: of its y axis.
        names: metrics whose sum is drawn; those that a run lacks are left out.
    """

    title: str
    unit: str
    names: tuple[str, ...]


PANELS = (
    Panel(title="reward", unit="mean reward", names=("reward/mean",)),
    Panel(title="KL to the reference", unit="nats per token", names=("actor/ref_kl",)),
    Panel(title="KL of the update", unit="nats per token", names=("actor/approx_kl",)),
    Panel(title="entropy", unit="nats per token", names=("actor/entropy",)),
    Panel(
        title="clip fraction, low and high",
        unit="share of tokens",
        names=("actor/clip_fraction_low", "actor/clip_fraction_high"),
    ),
    Panel(title="response length", unit="tokens", names=("rollout/response_length",)),
    Panel(title="mismatch of trainer and rollout engine", unit="nats per token", names=("actor/mismatch_abs_mean",)),
)


def main(arguments: Sequence[str]) -> int:
    """Writes the PNG and prints its path.

    Returns:
        The exit status: 2 if a run cannot be read or has none of the metrics.
    """
    given = _parse(arguments)
    try:
        histories = {name: read_history(path) for name, path in _named(given.runs).items()}
        figure = draw(histories)
    except RecordError as error:
        print(f"lightning-rlhf plot: {error}", file=sys.stderr)
        return REFUSED
    out = given.out or (given.runs[0] / "curves.png" if len(given.runs) == 1 and given.runs[0].is_dir() else None)
    out = Path("curves.png") if out is None else out
    out.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, out)
    print(out)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf plot",
        description="Draws reward, KL, entropy, clip fraction, response length, mismatch and where a step's time goes.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, such as outputs/NAME")
    parser.add_argument(
        "--out", type=Path, metavar="PNG", help="the file (default: curves.png, of a single run in its folder)"
    )
    return parser.parse_args(arguments)


def _named(runs: Sequence[Path]) -> dict[str, Path]:
    """A name for each run: its folder's, or as much of the path as tells them apart."""
    parts = [run.resolve().parts for run in runs]
    if len(set(parts)) != len(parts):
        raise RecordError(f"A run is named twice: {', '.join(map(str, runs))}.")
    depth = 1
    while len({part[-depth:] for part in parts}) != len(parts):
        depth += 1
    return {"/".join(part[-depth:]): run for part, run in zip(parts, runs, strict=True)}


def draw(histories: Mapping[str, History]) -> Figure:
    """The figure: one panel a quantity that any run has, then one for each run's times.

    Raises:
        RecordError: if no run has anything to show.
    """
    panels = [
        panel for panel in PANELS if any(name in history for name in panel.names for history in histories.values())
    ]
    timed = {run: times_of(history) for run, history in histories.items() if times_of(history)}
    count = len(panels) + len(timed)
    if not count:
        raise RecordError(
            f"{', '.join(histories)}: none of the metrics that are drawn; found "
            f"{', '.join(sorted({name for history in histories.values() for name in history})[:10])}."
        )
    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    figure = new_figure(5.0 * columns, 3.2 * rows)
    cells = iter(figure.subplots(rows, columns, squeeze=False).flatten())
    for panel in panels:
        _draw_panel(next(cells), panel, histories)
    for run, times in timed.items():
        _draw_times(next(cells), times, title="seconds of a step" + (f", {run}" if len(timed) > 1 else ""))
    for unused in cells:
        unused.set_axis_off()
    return figure


def total(history: History, names: Sequence[str]) -> dict[int, float]:
    """The sum of metrics, at the steps that have any of them."""
    found: dict[int, float] = {}
    for name in names:
        for step, value in history.get(name, {}).items():
            found[step] = found.get(step, 0.0) + value
    return found


def times_of(history: History) -> dict[str, dict[int, float]]:
    """The parts of a step's time, by name without ``time/``; the largest first."""
    parts = {
        name.removeprefix("time/"): values
        for name, values in history.items()
        if name.startswith("time/") and name not in _TIMES_NOT_PARTS
    }
    return dict(sorted(parts.items(), key=lambda item: -sum(item[1].values())))


def _draw_panel(axes: Any, panel: Panel, histories: Mapping[str, History]) -> None:
    alone = len(histories) == 1
    for index, (run, history) in enumerate(histories.items()):
        curve = total(history, panel.names)
        if curve:
            draw_curve(axes, curve, color=f"C{index}", label=None if alone else run)
    finish_axes(axes, ylabel=panel.unit, title=panel.title)
    axes.legend(loc="best", frameon=False, fontsize=7)


def _draw_times(axes: Any, times: Mapping[str, Mapping[int, float]], *, title: str) -> None:
    steps = sorted({step for values in times.values() for step in values})
    heights = [[max(values.get(step, 0.0), 0.0) for step in steps] for values in times.values()]
    below = [0.0] * len(steps)
    for (name, _), values in zip(times.items(), heights, strict=True):
        axes.bar(steps, values, bottom=below, width=1.0, label=name)
        below = [low + value for low, value in zip(below, values, strict=True)]
    finish_axes(axes, ylabel="s", title=title)
    axes.legend(loc="best", frameon=False, fontsize=7)
