"""Each ``lightning-rlhf`` line that the documentation shows is one that the command takes."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from hydra.errors import HydraException

from lightning_rlhf.cli.main import COMMANDS
from lightning_rlhf.cli.show_config import compose_run
from lightning_rlhf.cli.validate import Inspection

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
PARSERS = {name: name for name in ("evaluate", "export", "plot", "parity", "doctor")} | {"inspect": "inspect_rollouts"}
TINY = "experiment=grpo-tiny-1n1r-auto"


def _documented(page: Path) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if re.match(r"(?:[A-Z_]+=\S+ )*lightning-rlhf ", line)]


LINES = sorted({line for page in PAGES for line in _documented(page)})


def _overrides(arguments: list[str]) -> list[str]:
    """What a run is composed from: a name for each placeholder, and one value of those that a sweep goes through."""
    kept = []
    for argument in arguments:
        if argument in ("-m", "--json") or argument.startswith("hydra."):
            continue
        if argument in ("experiment=NAME", "experiment=..."):
            argument = TINY
        key, _, value = argument.partition("=")
        if key == "search":
            assert (ROOT / "configs" / "search" / f"{value}.yaml").is_file()
        else:
            kept.append(argument if value.startswith(("[", "{", "'")) else f"{key}={value.partition(',')[0]}")
    return kept


def _check(line: str) -> None:
    words = shlex.split(line, comments=True)
    command, *arguments = words[words.index("lightning-rlhf") + 1 :]
    if command == "--help":
        return
    assert command in COMMANDS
    if command in PARSERS:
        given = import_module(f"lightning_rlhf.cli.{PARSERS[command]}")._parse(arguments)
        arguments = getattr(given, "overrides", [])
    elif command == "prepare-model":
        return
    problems = Inspection(compose_run(_overrides(arguments))).problems
    assert [problem for problem in problems if "no value given (???)" not in problem] == []


def test_there_are_commands_on_the_pages() -> None:
    assert {word for line in LINES for word in line.split()} >= {*PARSERS, "train", "plan", "show-config"}


@pytest.mark.parametrize("line", LINES)
def test_a_documented_command_is_one_that_works(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what the lines take as being there
    monkeypatch.setenv("WANDB_RUN_ID", "trial1")
    (tmp_path / "my_rewards.py").write_text("def score(prompts, responses, metadata): return [0.0 for _ in responses]")
    monkeypatch.syspath_prepend(str(tmp_path))
    _check(line)


@pytest.mark.parametrize(
    "line",
    [
        "lightning-rlhf evalute outputs/NAME",
        "lightning-rlhf evaluate outputs/NAME --samples 8",
        "lightning-rlhf train experiment=NAME algorithm.learning_rate=1e-5",
        "lightning-rlhf plan experiment=grpo-qwen4",
    ],
)
def test_one_that_does_not_work_is_found(line: str) -> None:
    with pytest.raises((AssertionError, SystemExit, HydraException)):
        _check(line)
