from __future__ import annotations

import pytest

from lightning_rlhf.cli import main


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main.main(["--help"])
    assert leave.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("train", "show-config", "plan", "parity", "prepare-model"))


@pytest.mark.parametrize("command", [name for name in main.COMMANDS if name != "train"])  # hydra's own help
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main.main([command, "--help"])
    assert leave.value.code == 0
    assert f"usage: lightning-rlhf {command}" in capsys.readouterr().out


def test_an_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main.main(["trian", "experiment=x"])
    assert leave.value.code == 2
    err = capsys.readouterr().err
    assert all(name in err for name in ("trian", "train", "show-config", "prepare-model"))


def test_no_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main.main([])
    assert leave.value.code == 2


def test_flags_after_the_command_are_the_commands_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setitem(main.COMMANDS, "train", (lambda arguments: given.append(list(arguments)) or 7, ""))
    assert main.main(["train", "--help", "a.b=1"]) == 7
    assert given == [["--help", "a.b=1"]]


def test_prepare_model_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main.main(["prepare-model", "--help"])
    assert leave.value.code == 0
    assert "--out" in capsys.readouterr().out
