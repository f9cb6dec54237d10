from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlhf.cli.plot import draw, main, times_of, total
from lightning_rlhf.cli.run_records import History, RecordError

HISTORY: History = {
    "reward/mean": {1: 0.25, 2: 0.75},
    "actor/clip_fraction_low": {1: 0.1, 2: 0.2},
    "actor/clip_fraction_high": {2: 0.3},
    "actor/entropy": {1: 2.0, 2: 1.0},
    "rollout/response_length": {1: 8.0, 2: 9.0},
    "time/update": {1: 3.0, 2: 1.0},
    "time/rollout": {1: 5.0, 2: 5.0},
    "time/step": {1: 9.0, 2: 7.0},
}


def titles(histories: dict[str, History]) -> list[str]:
    return [axes.get_title() for axes in draw(histories).get_axes() if axes.axison]


def write(run: Path, history: History) -> Path:
    names = list(history)
    lines = [",".join([*names, "step"])]
    for step in sorted({step for values in history.values() for step in values}):
        lines.append(",".join([*(str(history[name].get(step, "")) for name in names), str(step)]))
    folder = run / "csv" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return run


def test_sums_and_parts_of_a_step() -> None:
    found = total(HISTORY, ["actor/clip_fraction_low", "actor/clip_fraction_high", "absent"])
    assert found == {1: 0.1, 2: 0.5}
    assert list(times_of(HISTORY)) == ["rollout", "update"]  # the whole is no part


def test_a_panel_for_each_thing_that_a_run_has() -> None:
    assert titles({"a": HISTORY}) == [
        "reward", "entropy", "clip fraction, low and high", "response length", "seconds of a step",
    ]  # fmt: skip
    assert titles({"a": {"reward/mean": {1: 0.0}}}) == ["reward"]
    with pytest.raises(RecordError, match="none of the metrics that are drawn; found foo"):
        draw({"a": {"foo": {1: 1.0}}})


def test_runs_lie_over_each_other_under_their_names() -> None:
    figure = draw({"a": HISTORY, "b": {"reward/mean": {1: 0.5, 2: 1.0}}})
    reward, entropy = figure.get_axes()[:2]
    assert [text.get_text() for text in reward.get_legend().get_texts()] == ["a", "b"]
    assert [line.get_ydata().tolist() for line in reward.get_lines()[::2]] == [[0.25, 0.75], [0.5, 1.0]]
    assert [text.get_text() for text in entropy.get_legend().get_texts()] == ["a"]


def test_times_are_stacked_to_their_sum() -> None:
    bars = draw({"a": HISTORY}).get_axes()[4].containers
    assert [bar.get_label() for bar in bars] == ["rollout", "update"]
    assert [patch.get_y() + patch.get_height() for patch in bars[1]] == [8.0, 6.0]


def test_the_command_writes_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "x" / "run", HISTORY), write(tmp_path / "y" / "run", HISTORY)
    assert main([str(first)]) == 0
    assert (first / "curves.png").read_bytes().startswith(b"\x89PNG")
    out = tmp_path / "new" / "both.png"
    assert main([str(first), str(second), "--out", str(out)]) == 0
    assert len(out.read_bytes()) > 20_000
    assert capsys.readouterr().out.splitlines() == [str(first / "curves.png"), str(out)]
    assert main([str(first), str(first)]) == 2
    assert main([str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "named twice" in err
    assert "holds no metrics.csv" in err
