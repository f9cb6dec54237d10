from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import WandbLogger
from rich.console import Console
from support.scripted import ScriptedGRPO, scripted_data, scripted_fit

from lightning_rlhf.callbacks import SampleTable
from lightning_rlhf.callbacks.samples import shortened


def run(tmp_path: Path, module: ScriptedGRPO, **kwargs: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    data = kwargs.pop("data", None)
    scripted_fit(module, tmp_path, [SampleTable(console=console, **kwargs)], data=data)
    return console.file.getvalue()


def test_the_first_step_and_every_nth_have_a_table(tmp_path: Path) -> None:
    text = run(tmp_path, ScriptedGRPO([0.0, 0.0, 0.0, 0.5, 0.0, 1.0, 0.0]), every_n_steps=3)
    shown = [line.strip() for line in text.splitlines() if line.startswith("Samples")]
    assert shown == ["Samples of RL step 1", "Samples of RL step 3", "Samples of RL step 6"]
    assert "1 + 3 =" in text
    assert "1.000" in text


def test_rows_are_of_different_prompts_first(tmp_path: Path) -> None:
    module = ScriptedGRPO([0.5], responses=("alpha", "beta"))
    text = run(tmp_path, module, num_samples=3)
    assert text.index("1 + 3 =") < text.index("beta") < text.index("2 + 2 =")
    assert text.count("alpha") == 2  # of both prompts
    assert text.count("beta") == 1  # the third row, in its place


def test_markup_and_escape_sequences_of_a_model_are_only_text(tmp_path: Path) -> None:
    text = run(tmp_path, ScriptedGRPO([0.5], responses=("[bold]4[/bold] \x1b[31mred\x07 [/none]",)))
    assert "[bold]4[/bold]" in text
    assert "[/none]" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_a_failed_reward_is_not_shown_as_a_number(tmp_path: Path) -> None:
    text = run(tmp_path, ScriptedGRPO([None]))
    assert "none" in text
    assert "nan" not in text


def test_long_texts_keep_both_ends() -> None:
    text = "start " + "x" * 500 + " the answer is 42"
    short = shortened(text, 60)
    assert len(short) == 60
    assert short.startswith("start xx")
    assert short.endswith("the answer is 42")
    assert shortened("a\n\n b\tc", 60) == "a b c"
    assert shortened("x" * 60, 60) == "x" * 60


def test_i04_wandb_gets_the_full_texts_at_the_rl_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    calls: list[dict[str, Any]] = []

    class Recording(WandbLogger):
        def log_table(self, key: str, **kwargs: Any) -> None:
            calls.append({"key": key, **kwargs})
            super().log_table(key, **kwargs)

    long = "y" * 600
    logger = Recording(save_dir=tmp_path, project="test")
    table = SampleTable(every_n_steps=2, console=Console(file=io.StringIO()))
    module = ScriptedGRPO([0.25, 0.5], responses=(long,))
    scripted_fit(module, tmp_path, [table], data=scripted_data(), logger=logger)
    logger.experiment.finish()
    assert [(call["key"], call["step"]) for call in calls] == [("samples", 1), ("samples", 2)]
    assert calls[1]["columns"] == ["prompt", "answer", "reward"]
    assert calls[1]["data"] == [["1 + 3 =", long, 0.5], ["2 + 2 =", long, 0.5]]


def test_arguments_out_of_range() -> None:
    for kwargs in ({"every_n_steps": 0}, {"num_samples": 0}, {"max_characters": 5}):
        with pytest.raises(ValueError, match=f"{next(iter(kwargs))} must be at least"):
            SampleTable(**kwargs)
