from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlhf.cli.run_records import RecordError, dumped_steps, if_absent, read_history, read_rollouts


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_resumed_runs_later_version_counts_and_numbers_order_versions(tmp_path: Path) -> None:
    header = "reward/mean,rl_step,step,time/step\n"
    write(tmp_path / "csv" / "version_9" / "metrics.csv", header + "0.1,1,1,5\n0.2,2,2,5\n0.3,3,3,5\n")
    write(tmp_path / "csv" / "version_10" / "metrics.csv", header + "0.9,3,3,\n0.4,4,4,nan\n")
    history = read_history(tmp_path)
    assert history["reward/mean"] == {1: 0.1, 2: 0.2, 3: 0.9, 4: 0.4}
    assert {step: value for step, value in history["time/step"].items() if step < 4} == {1: 5.0, 2: 5.0, 3: 5.0}
    assert history["time/step"][4] != history["time/step"][4]  # a NaN stays one
    assert "rl_step" not in history


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "metrics.csv", "a,step\n1.5,1\n2.5")
    assert read_history(file) == read_history(tmp_path) == {"a": {1: 1.5}}


@pytest.mark.parametrize("content", [None, "a,step\n"])
def test_a_folder_without_metrics_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        write(tmp_path / "run" / "metrics.csv", content)
    with pytest.raises(RecordError, match="no metrics.csv" if content is None else "no RL step yet"):
        read_history(tmp_path / "run")


def test_dumps_are_found_in_order_and_damage_is_named(tmp_path: Path) -> None:
    for step in (10, 9):
        write(tmp_path / "rollouts" / f"rl_step={step:06d}.jsonl", '{"reward": null}\n{"reward": 1')
    write(tmp_path / "rollouts" / "rl_step=000011.jsonl.part", "")
    assert list(dumped_steps(tmp_path)) == list(dumped_steps(tmp_path / "rollouts")) == [9, 10]
    with pytest.raises(RecordError, match="line 2: not JSON"):
        read_rollouts(dumped_steps(tmp_path)[9])
    with pytest.raises(RecordError, match="line 1: not a rollout"):
        read_rollouts(write(tmp_path / "other.jsonl", "[1]\n"))
    with pytest.raises(RecordError, match="holds no dumped rollouts"):
        dumped_steps(tmp_path / "nowhere")


def test_a_path_that_is_not_there_is_answered_by_what_is(tmp_path: Path) -> None:
    write(tmp_path / "outputs" / "run-b" / "config.yaml", "")
    write(tmp_path / "outputs" / "run-a" / "config.yaml", "")
    assert if_absent(tmp_path / "outputs" / "run-a") == ""
    assert if_absent(tmp_path / "outputs" / "run-c").endswith("outputs holds run-a, run-b.")
    assert if_absent(tmp_path / "no" / "such" / "folder").endswith(f"{tmp_path} holds outputs.")
    for read in (read_history, dumped_steps):
        with pytest.raises(RecordError, match=r"There is no .*run-c; .* holds run-a, run-b"):
            read(tmp_path / "outputs" / "run-c")
