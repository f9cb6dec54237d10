"""Sweeps: W&B's files through an agent's loop without a server, hydra's multirun with Optuna and joblib."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import wandb_file
from support.tiny import write_tiny_model

from lightning_rlhf.cli.overrides import allow_defaults
from lightning_rlhf.cli.show_config import compose_run
from lightning_rlhf.cli.validate import Inspection

SWEEPS = sorted((Path(str(files("lightning_rlhf.configs"))) / "sweep").glob("*.yaml"))
LIMIT = 200.0
VALIDATED = (
    "algorithm.max_rl_steps=2",
    "algorithm.mini_batch_size=8",  # two optimizer steps in each RL step
    "trainer.val_check_interval=1",
    "trainer.limit_val_batches=1",
    "+data.val_source._target_=lightning_rlhf.data.ReasoningGymPrompts",
    "+data.val_source.task=chain_sum",
    "+data.val_source.size=4",
    "+data.val_source.seed=1",
)


def sweep(name: str) -> dict[str, Any]:
    (file,) = (file for file in SWEEPS if file.stem == name)
    loaded: dict[str, Any] = yaml.safe_load(file.read_text())
    return loaded


def trials(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A trial for each combination; of a range, its ends."""
    choices = [spec["values"] if "values" in spec else [spec["min"], spec["max"]] for spec in parameters.values()]
    for values in itertools.product(*choices):
        yield {name: {"value": value} for name, value in zip(parameters, values, strict=True)}


def command_of(found: dict[str, Any], trial: dict[str, Any]) -> list[str]:
    """What a W&B agent makes of a sweep's ``command``, by W&B's own functions."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    words = utils.create_sweep_command(copy.deepcopy(found["command"]))
    values = utils.create_sweep_command_args({"args": trial})
    made: list[str] = []
    for word in words:
        made += values[word[2:-1]] if word.startswith("${") and word.endswith("}") else [word]
    return made


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_every_trial_of_a_sweep_is_a_run_that_is_valid(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    found = sweep(file.stem)
    assert (found["metric"]["name"], found["metric"]["goal"]) == ("reward/mean", "maximize")
    folders = set()
    for trial in trials(found["parameters"]):
        program, command, *overrides = command_of(found, trial)
        assert (program, command) == ("lightning-rlhf", "train")
        cfg = compose_run(overrides)
        inspection = Inspection(cfg)
        assert inspection.problems == []
        folders.add(cfg.run_dir)
        for name, choice in trial.items():
            assert inspection.values[name] == choice["value"]
    assert folders == {"outputs/sweep/abc"}  # of the agent's run: trials do not share one


def test_an_agents_loop_runs_trials_one_process_each(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    model = write_tiny_model(tmp_path / "model")
    small = ["experiment=grpo-tiny-1n1r-auto", f"model.path={model}", *VALIDATED]
    found, wrote = sweep("grid"), {}
    for number, trial in enumerate(itertools.islice(trials(found["parameters"]), 0, 4, 3)):
        _, _, *overrides = (word for word in command_of(found, trial) if not word.startswith("experiment="))
        done = subprocess.run(
            [sys.executable, "-m", "lightning_rlhf.cli.main", "train", *small, *overrides, "logger.wandb.offline=true"],
            cwd=tmp_path,
            env={**os.environ, "WANDB_RUN_ID": f"trial{number}", "WANDB_SWEEP_ID": "local", "WANDB_SILENT": "true"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (file,) = (tmp_path / "outputs" / "sweep" / f"trial{number}" / "wandb").glob("offline-run-*/*.wandb")
        assert file.name == f"run-trial{number}.wandb"
        config = wandb_file.config(file)
        wrote[number] = (config["algorithm"]["optimizer"]["lr"], config["seed"])
        rows = wandb_file.history(file)
        assert [row["rl_step"] for row in rows if "reward/mean" in row] == [1, 2]
        # Lightning would have them over its global_step, which has counted other steps by then
        validated = [(row["rl_step"], row["trainer/global_step"]) for row in rows if "val/reward" in row]
        assert [step for step, _ in validated] == [1, 2]
        assert all(step != counted for step, counted in validated)
        assert wandb_file.axes(file)["*"] == "rl_step"
    assert wrote == {0: (1e-6, 0), 1: (5e-6, 1)}


def test_optuna_proposes_trials_that_run_in_processes_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    model = write_tiny_model(tmp_path / "model")
    arguments = ["experiment=grpo-tiny-1n1r-auto", f"model.path={model}", "algorithm.max_rl_steps=1"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlhf.cli.main", "train", "-m", *arguments, "search=optuna",
         "hydra.sweeper.n_trials=2", "seed=3"],
        cwd=tmp_path, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "multirun" / "grpo-tiny-1n1r-auto"
    rates = []
    for number in (0, 1):
        config = yaml.safe_load((folder / str(number) / "config.yaml").read_text())
        assert 1e-7 <= config["algorithm"]["optimizer"]["lr"] <= 1e-4
        assert 0.2 <= config["algorithm"]["clip_high"] <= 0.4
        rates.append(config["algorithm"]["optimizer"]["lr"])
    assert len(set(rates)) == 2
    best = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert best["name"] == "optuna"
    assert 0.0 <= best["best_value"] <= 1.0
    assert not (tmp_path / "outputs").exists()


def test_plain_overrides_of_a_search_reach_hydra_as_they_are() -> None:
    assert allow_defaults(["search=grid", "algorithm.kl_coef=0,0.1"]) == ["search=grid", "++algorithm.kl_coef=0,0.1"]
