"""The doctor's judgement. That what works is tried for real is in ``tests/trainer/test_doctor.py``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lightning_rlhf.cli import doctor
from lightning_rlhf.cli.doctor import CHECKS, Check, examine, main, versions
from lightning_rlhf.cli.doctor_tries import TRIES


def test_every_back_end_rollout_and_checkpoint_engine_has_a_check() -> None:
    from lightning_rlhf import weights  # noqa: F401  (registers)
    from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
    from lightning_rlhf.contracts.engine import EngineRegistry

    names = {check.name for check in CHECKS}
    assert {f"backend:{backend}" for _, backend, _ in EngineRegistry._classes} <= names
    assert {f"weights:{name}" for name in CheckpointEngineRegistry._factories} <= names
    assert names - {"backend:torch"} - {name for name in names if name.startswith("weights:")} == TRIES.keys()
    assert all(check.remedy for check in CHECKS)


def test_versions_say_what_is_missing() -> None:
    found = versions()
    assert found["lightning-rlhf"] is not None
    assert found["torch"] is not None
    assert set(doctor.PACKAGES) <= found.keys()


def test_what_is_not_installed_or_not_built_is_not_tried() -> None:
    absent = Check(name="rollout:vllm", remedy="pip install it", needs=("no-such-package", "nor-this"))
    unknown = Check(name="weights:pigeon", remedy="x")
    start = time.monotonic()
    first, second = examine([absent, unknown], limit_seconds=60)
    assert time.monotonic() - start < 5
    assert (first.works, first.detail, first.remedy) == (
        False, "no-such-package or nor-this is not installed", "pip install it",
    )  # fmt: skip
    assert second.detail == "pigeon is not part of this version"
    assert not second.works


def use_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """Puts another program in the place of a try's."""
    script = tmp_path / "try.sh"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(script))


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("printf 'Traceback\\n  File x\\nValueError: a reason\\nTip: more\\n' >&2; exit 1", "ValueError: a reason"),
        ("kill -SEGV $$", "ended by SIGSEGV"),
        ("exit 3", "ended with status 3"),
        ("echo no line of the doctor; exit 0", "ended with status 0"),
    ],
)
def test_a_try_that_fails_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, detail: str
) -> None:
    use_script(monkeypatch, tmp_path, body)
    (finding,) = examine([Check(name="smoke", remedy="mend it")], limit_seconds=20)
    assert (finding.works, finding.detail, finding.remedy) == (False, detail, "mend it")


def test_a_try_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_script(monkeypatch, tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; wait")
    start = time.monotonic()
    (finding,) = examine([Check(name="smoke", remedy="x")], limit_seconds=1)
    assert time.monotonic() - start < 20
    assert finding.detail == "not done after 1 s"
    assert "--only smoke --limit" in finding.remedy
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 10
    while time.monotonic() < end and _alive(child):
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_good_try_tells_of_the_torch_back_end_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_script(monkeypatch, tmp_path, "echo noise; echo 'doctor: one step'; echo more noise")
    smoke, torch = examine([check for check in CHECKS if check.name in ("smoke", "backend:torch")], limit_seconds=20)
    assert (smoke.name, smoke.works, smoke.detail, smoke.remedy) == ("smoke", True, "one step", "")
    assert (torch.name, torch.works, torch.detail) == ("backend:torch", True, "one step")


def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "smoke,nothing"]) == 2
    assert "no check nothing; there are smoke" in capsys.readouterr().err
    use_script(monkeypatch, tmp_path, "exit 1")
    assert main(["--only", "smoke"]) == 1
    out = capsys.readouterr().out
    assert "-> pip install" in out
    assert main(["--only", "backend:torch", "--json"]) == 0
