"""What a run has left in its folder, read back: metrics by RL step, and rollouts."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_rlhf.callbacks.rollout_files import FOLDER, FORMATS, RolloutFileError, read_rows

_DUMP = re.compile(rf"rl_step=(\d+)\.({'|'.join(FORMATS)})$")
_VERSION = re.compile(r"version_(\d+)$")

History = dict[str, dict[int, float]]
"""Metric to RL step to value."""


class RecordError(ValueError):
    """A run's folder lacks what was asked of it; the message says what was found and what to do."""


def if_absent(path: Path) -> str:
    """Of a path that is not there: a sentence that says so, and what is in the nearest folder that is; else ``""``."""
    if path.exists():
        return ""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    held = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return f" There is no {path}; {folder} holds {held or 'nothing'}."


def read_history(run: Path) -> History:
    """Every metric of a run, by RL step.

    They come from the CSV logger's ``metrics.csv``; of a run that was resumed, what was logged last for a step counts.
    Steps that a killed run had done and a resumed one did again are thus those of the resumed one.

    Args:
        run: the run's folder, one that a CSVLogger wrote, or a ``metrics.csv``.

    Raises:
        RecordError: if there is none, or it holds no RL step.
    """
    files = _metric_files(run)
    if not files:
        raise RecordError(
            f"{run} holds no metrics.csv. Name a run's folder, such as outputs/NAME, of a run with a CSV logger "
            f"(logger=csv, as by default).{if_absent(run)}"
        )
    history: History = {}
    for file in files:
        for name, values in _read_file(file).items():
            history.setdefault(name, {}).update(values)
    if not history:
        raise RecordError(f"{run}: {', '.join(map(str, files))} hold(s) no RL step yet.")
    return history


def _metric_files(run: Path) -> list[Path]:
    """In the order in which they were written."""
    if run.is_file():
        return [run] if run.name == "metrics.csv" else []
    if (run / "metrics.csv").is_file():
        return [run / "metrics.csv"]
    # by the versions' numbers: copying a folder changes its times
    found = [(int(match[1]), file) for file in run.glob("*/version_*/metrics.csv") if (match := _version(file))]
    return [file for _, file in sorted(found)]


def _version(file: Path) -> re.Match[str] | None:
    return _VERSION.match(file.parent.name)


def _read_file(file: Path) -> History:
    history: History = {}
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            # `step` is what the logger was called with: the RL step. A line that a kill cut short has none.
            step = row.get("step")
            if not step or not step.isdigit():
                continue
            for name, text in row.items():
                if name not in ("step", "epoch", "rl_step", None) and text:
                    history.setdefault(name, {})[int(step)] = float(text)
    return history


def dumped_steps(run: Path) -> dict[int, Path]:
    """The files of ``RolloutDump``, by RL step.

    Args:
        run: the run's folder, or the folder of the files.

    Raises:
        RecordError: if there are none.
    """
    for folder in (run / FOLDER, run):
        found = {int(match[1]): path for path in folder.glob("rl_step=*") if (match := _DUMP.match(path.name))}
        if found:
            return dict(sorted(found.items()))
    raise RecordError(
        f"{run} holds no dumped rollouts ({FOLDER}/rl_step=*.jsonl or .parquet). Name a run's folder; RolloutDump "
        f"writes them, unless the run said callbacks.rollout_dump=null.{if_absent(run)}"
    )


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rows of one file.

    Raises:
        RecordError: if the file is not as ``RolloutDump`` writes it.
    """
    try:
        return read_rows(path)
    except (RolloutFileError, ImportError) as error:
        raise RecordError(str(error)) from error


def reward_of(row: Mapping[str, Any]) -> float:
    """A row's reward; NaN where it failed."""
    return math.nan if row["reward"] is None else float(row["reward"])
