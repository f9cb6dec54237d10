"""One trial of a search: a run in a process of its own, and the number that it is judged by."""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

WINDOW = 5
"""RL steps at a run's end whose mean reward is the trial's result."""


class TrialError(RuntimeError):
    """A trial that gave no result."""


def run_trial() -> float:
    """Runs the job that hydra's multirun is at, in a fresh process, in the folder that hydra gives it.

    A process can hold one rollout engine's memory, one process group, one W&B run; and Lightning starts further ranks
    with the command line of their parent, which must be that of one run.

    Returns:
        The mean over the last ``WINDOW`` RL steps of the mean reward, for a sweeper such as Optuna.

    Raises:
        TrialError: if the run failed, or left no rewards.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    done = subprocess.run(trial_command(folder), check=False)
    if done.returncode != 0:
        raise TrialError(f"The trial in {folder} ended with status {done.returncode}; its own lines above say why.")
    return result_of(folder)


def trial_command(folder: Path) -> list[str]:
    """The command line of the run that hydra's current job stands for.

    Args:
        folder: where it writes.
    """
    hydra = HydraConfig.get()
    overrides = [text for text in hydra.overrides.task if not text.lstrip("+").startswith("run_dir=")]
    places = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    further = ["--config-dir", *places] if places else []
    return [sys.executable, "-m", "lightning_rlhf.cli.train", *further, *overrides, f"run_dir='{folder}'"]


def result_of(folder: Path) -> float:
    """The mean of the last rewards that the run's report wrote.

    Raises:
        TrialError: if there are none.
    """
    file = folder / "reward.csv"
    if not file.is_file():
        raise TrialError(f"{file} is not there: a search reads it. Keep callbacks.report.")
    with file.open(encoding="utf-8", newline="") as lines:
        rewards = [float(row["reward_mean"]) for row in csv.DictReader(lines)]
    if not rewards:
        raise TrialError(f"{file} holds no RL step.")
    return statistics.fmean(rewards[-WINDOW:])
