from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from rich.console import Console
from support.scripted import ScriptedGRPO, scripted_data, scripted_fit

from lightning_rlhf.callbacks import RLProgressBar, SampleTable, Throughput
from lightning_rlhf.callbacks.progress import total_rl_steps


def run(tmp_path: Path, console: Console, module: ScriptedGRPO, **kwargs: Any) -> list[str]:
    callbacks = [RLProgressBar(console=console), *kwargs.pop("callbacks", [Throughput()])]
    scripted_fit(module, tmp_path, callbacks, enable_progress_bar=True, **kwargs)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_each_step_is_one_plain_line(tmp_path: Path) -> None:
    lines = run(tmp_path, Console(file=io.StringIO(), width=20), ScriptedGRPO([0.25, 0.5, 0.75]))
    assert len(lines) == 3
    number = r"[\d,]+"
    for step, (line, reward) in enumerate(zip(lines, ("0.2500", "0.5000", "0.7500"), strict=True), start=1):
        left = r"  \d+:\d\d:\d\d left" if step < 3 else ""
        expected = rf"step {step}/3  reward {reward}  {number} tok/s  \d+\.\d s/step  policy version {step}{left}"
        assert re.fullmatch(expected, line), line


def test_missing_metrics_are_left_out(tmp_path: Path) -> None:
    lines = run(tmp_path, Console(file=io.StringIO()), ScriptedGRPO([None, None]), callbacks=[])
    assert re.fullmatch(r"step 1/2  policy version 1  .* left", lines[0])
    assert lines[1] == "step 2/2  policy version 2"


def test_on_a_terminal_it_is_a_bar_that_ends_full_and_tables_stand_above_it(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160, color_system=None)
    table = SampleTable(every_n_steps=2, console=console)
    lines = run(tmp_path, console, ScriptedGRPO([0.25, 0.5]), callbacks=[Throughput(), table])
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "\n".join(lines))
    assert re.search(r"RL step ━+ 2/2 reward 0\.5000 .* tok/s .* policy version 2", text)
    assert "Samples of RL step 2" in text
    assert "\x1b[?25h" in "\n".join(lines)  # the cursor is given back


def test_after_a_failure_the_terminal_is_given_back(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)

    class Failing(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        run(tmp_path, console, ScriptedGRPO([0.25, 0.5]), callbacks=[Failing()])
    assert console.file.getvalue().endswith("\x1b[?25h")


def test_the_total_is_the_tightest_bound(tmp_path: Path) -> None:
    def total(**kwargs: Any) -> int | None:
        module = ScriptedGRPO([0.0] * 9, max_rl_steps=kwargs.pop("max_rl_steps"))
        data = scripted_data([str(i) for i in range(8)])
        trainer = scripted_fit(module, tmp_path, [], data=data, **kwargs)
        return total_rl_steps(trainer, module)

    assert total(max_rl_steps=9, max_epochs=2) == 8  # 4 steps an epoch
    assert total(max_rl_steps=3, max_epochs=2) == 3
    assert total(max_rl_steps=3, max_epochs=-1) == 3
    module = ScriptedGRPO([0.0], max_rl_steps=1)
    trainer = scripted_fit(module, tmp_path, [])
    module.max_rl_steps = None
    assert total_rl_steps(trainer, module) is None


def test_disabled_it_says_nothing(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    bar = RLProgressBar(console=console)
    bar.disable()
    scripted_fit(ScriptedGRPO([0.25]), tmp_path, [bar], enable_progress_bar=True)
    assert console.file.getvalue() == ""
