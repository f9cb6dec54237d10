from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_rlhf.callbacks.rollout_files import dump_path, write_rows
from lightning_rlhf.cli.inspect_rollouts import browse, chosen, main, summary
from lightning_rlhf.cli.run_records import RecordError, dumped_steps


def row(uid: str, sample: int, reward: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "rl_step": 1, "uid": uid, "sample_index": sample, "prompt": "1 + 1 =", "response": f"answer {uid}{sample}",
        "reward": reward, "advantage": None if reward is None else reward - 0.5, "finish_reason": "stop",
        "response_token_ids": [1] * (sample + 1), **changes,
    }  # fmt: skip


ROWS = [row("a", 0, 1.0), row("a", 1, 0.0), row("b", 0, None), row("b", 1, 0.5, finish_reason="length")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_rows(dump_path(tmp_path / "rollouts", 1), ROWS)
    write_rows(dump_path(tmp_path / "rollouts", 2), [row("c", index, float(index)) for index in range(12)])
    write_rows(dump_path(tmp_path / "rollouts", 5), ROWS[:1])
    return tmp_path


def test_the_choice_of_rows() -> None:
    def names(**choice: Any) -> list[str]:
        return [f"{one['uid']}{one['sample_index']}" for one in chosen(ROWS, **choice)]

    assert names() == ["a0", "a1", "b0", "b1"]
    assert names(top=2) == ["a0", "b1"]
    assert names(bottom=2) == ["a1", "b1"]
    assert names(top=9) == ["a0", "b1", "a1", "b0"]  # a failed reward is neither high nor low
    assert names(bottom=9)[-1] == "b0"
    assert names(uid="b") == ["b0", "b1"]
    with pytest.raises(RecordError, match=r"uid 'z'; this step has a, b"):
        names(uid="z")


def test_the_summary_by_hand() -> None:
    assert summary(ROWS) == (
        "4 rollouts of 2 prompts (1 without signal); reward mean 0.5000, 0 to 1, 1 failed; "
        "response 1.5 tokens, at most 2; 3 stop, 1 length"
    )


def test_json_gives_back_what_was_dumped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--step", "1", "--top", "1", "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [ROWS[0]]


def test_parquet_shows_as_jsonl_does(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {
        "metadata": {"answer": 2, "tags": ["a"]}, "prompt_token_ids": [1, 2], "rollout_log_probs": [-0.5],
        "policy_version": 3, "trained": True,
    }  # fmt: skip
    shown = {}
    for name in ("jsonl", "parquet"):
        folder = tmp_path / name
        write_rows(folder / "rollouts" / f"rl_step=000001.{name}", [{**one, **whole} for one in ROWS])
        assert main([str(folder)]) == 0
        table = capsys.readouterr().out
        assert main([str(folder), "--json"]) == 0
        shown[name] = table, [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert shown["parquet"] == shown["jsonl"]
    assert "answer a0" in shown["parquet"][0]
    file = dumped_steps(tmp_path / "parquet")[1]
    file.write_bytes(file.read_bytes()[:100])
    assert main([str(tmp_path / "parquet")]) == 2
    assert "not parquet" in capsys.readouterr().err


def test_the_last_step_is_shown_and_long_steps_are_cut(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "RL step 5: 1 rollouts" in out
    assert "answer a0" in out
    assert main([str(run), "--step", "2"]) == 0
    assert "2 more; --all shows them" in capsys.readouterr().out
    assert main([str(run), "--step", "2", "--all"]) == 0
    assert "more;" not in capsys.readouterr().out


def test_what_a_model_wrote_does_not_reach_the_terminal_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(dump_path(tmp_path / "rollouts", 1), [row("\x1b]0;uid\x07", 0, 1.0, response="\x1b[2J[bold]x[/]")])
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[bold]x" in out


def test_browsing_by_keys(run: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    answers = iter(["n", "n", "p", "2", "t", "7", "q"])
    browse(console, dumped_steps(run), 1, lambda _: next(answers), max_characters=80)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split(":")[0] for line in text.splitlines() if line.startswith("RL step")] == [
        "RL step 1", "RL step 2", "RL step 5", "RL step 2", "RL step 2", "RL step 2", "RL step 2",
    ]  # fmt: skip
    assert "'7': not a key, and no step of 1-2, 5" in text
    browse(console, dumped_steps(run), 1, _ended, max_characters=80)


def _ended(_: str) -> str:
    raise EOFError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "--step", "3"], "no rollouts of RL step 3; it has 1-2, 5."),
        (["{run}/nowhere"], "holds no dumped rollouts"),
        (["{run}", "--uid", "z"], "No rollout has the uid 'z'"),
    ],
)
def test_what_is_not_there_is_named(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(run=run) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def test_flags_that_exclude_each_other(run: Path) -> None:
    for wrong in (["--top", "1", "--bottom", "1"], ["--top", "0"], ["--json", "--browse"]):
        with pytest.raises(SystemExit) as leave:
            main([str(run), *wrong])
        assert leave.value.code == 2
