"""The doctor tries for real: processes of its own, each with the product in it."""

from __future__ import annotations

import json

import pytest

from lightning_rlhf.cli import doctor_tries
from lightning_rlhf.cli.doctor import main


def test_the_smoke_step_and_a_checkpoint_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "smoke,backend:torch,weights:naive", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(check["name"], check["works"]) for check in report["checks"]] == [
        ("smoke", True),
        ("backend:torch", True),
        ("weights:naive", True),
    ], report
    assert report["machine"]["cpu_cores"] >= 1
    assert report["versions"]["torch"]
    assert "gradient norm" in report["checks"][0]["detail"]


@pytest.mark.slow
def test_everything_that_this_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    for name in ("backend:fsdp2", "backend:ulysses", "rollout:vllm"):
        assert found[name]["works"], found[name]
    assert all(check["works"] or check["remedy"] for check in found.values())


def test_a_checkpoint_engine_that_changes_a_tensor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    carry = doctor_tries._carry_here

    def changed(*arguments: object) -> dict[str, object]:
        received = carry(*arguments)  # type: ignore[arg-type]
        received["third"] = received["third"] + 1
        return received  # type: ignore[return-value]

    monkeypatch.setattr(doctor_tries, "_carry_here", changed)
    with pytest.raises(doctor_tries.TryError, match="'third' arrived changed"):
        doctor_tries.checkpoint_engine("naive")
