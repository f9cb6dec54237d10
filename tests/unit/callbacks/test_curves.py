from __future__ import annotations

import math
from pathlib import Path

import pytest

from lightning_rlhf.callbacks.curves import draw_curve, finish_axes, new_figure, running_mean, save_figure


def test_running_mean_by_hand() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]
    assert running_mean([1.0, math.nan, 3.0], window=2) == [1.0, 1.0, 3.0]
    assert math.isnan(running_mean([math.nan])[0])


def test_a_curve_has_its_values_and_its_mean(tmp_path: Path) -> None:
    figure = new_figure(4, 3)
    axes = figure.add_subplot()
    draw_curve(axes, {2: 3.0, 1: 1.0}, color="C0")
    finish_axes(axes, ylabel="reward", title="a title")
    each, mean = axes.get_lines()
    assert each.get_xydata().tolist() == [[1.0, 1.0], [2.0, 3.0]]
    assert mean.get_xydata().tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert [text.get_text() for text in axes.legend().get_texts()] == ["each step", "mean of the last 5 steps"]
    save_figure(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    with pytest.raises(FileNotFoundError):
        save_figure(figure, tmp_path / "nowhere" / "a.png")
