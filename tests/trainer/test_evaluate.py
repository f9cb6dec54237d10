"""``lightning-rlhf evaluate`` with real engines on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fork import run_distributed
from support.toy import toy_data, toy_module, toy_trainer
from transformers import AutoConfig

from lightning_rlhf.callbacks import RLCheckpoint
from lightning_rlhf.cli.evaluate import _positions, main
from lightning_rlhf.cli.inspect_rollouts import main as inspect


def prompts(folder: Path) -> list[str]:
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "task": "add" if i % 2 else "other"} for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["data=jsonl", f"data.source.path={folder / 'prompts.jsonl'}", "reward=gsm8k"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


FLAGS = ["--rollout", "hf", "--max-new-tokens", "6", "--max-model-len", "64", "--threshold", "0"]


def test_a_model_directory(tmp_path: Path, tiny_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = prompts(tmp_path)
    sampled = ["--num-samples", "4", "--k", "1,4", "--dump", str(tmp_path / "dump")]
    first = run(capsys, str(tiny_directory), *where, *FLAGS, *sampled)
    again = run(capsys, str(tiny_directory), *where, *FLAGS, *sampled)
    assert {**first, "seconds": 0} == {**again, "seconds": 0}  # the seed decides
    assert list(first["tasks"]) == ["other", "add"]
    assert [part["num_prompts"] for part in first["tasks"].values()] == [3, 3]
    assert first["all"]["num_prompts"] == 6
    assert set(first["all"]) >= {"mean", "pass@1", "pass@4", "failed", "truncated_fraction", "response_length"}
    # a reward of 0 or more, on every sample that has a verdict
    assert first["all"]["failed"] < 24 or first["all"]["pass@1"] is None
    assert inspect([str(tmp_path / "dump"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 24
    known = [row["reward"] for row in rows if row["reward"] is not None]
    assert first["all"]["failed"] == 24 - len(known)
    other = run(capsys, str(tiny_directory), *where, *FLAGS, *sampled[:-2], "--seed", "1", "--limit", "2")
    assert other["all"]["num_prompts"] == 2


def test_a_runs_checkpoint_with_its_own_prompts_and_reward(
    tmp_path: Path, tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import yaml

    trainer = toy_trainer(tmp_path, callbacks=[RLCheckpoint(every_n_rl_steps=1)])
    trainer.fit(toy_module(tiny_directory, max_rl_steps=1), toy_data())
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": "2 + 2 =", "answer": "4"}\n'
    )
    config = {
        "model": {"path": str(tiny_directory)},
        "data": {"source": {"_target_": "lightning_rlhf.data.JSONLPrompts", "path": str(tmp_path / "prompts.jsonl")}},
        "reward": {"_target_": "support.toy.digit_reward", "_partial_": True},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    found = run(capsys, str(tmp_path), *FLAGS)
    assert found["temperature"] == 0.0
    assert found["tasks"].keys() == {"all"}
    assert 0.0 <= found["all"]["mean"] <= 1.0
    assert found["all"]["pass@1"] == 1.0  # every reward reaches the threshold 0
    assert main([str(tmp_path), *FLAGS]) == 0
    assert "mean@1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-samples", "2", "--k", "4"], "each k must lie between 1 and --num-samples 2"),
        (["--k", "x"], "expected whole numbers"),
        (["--num-samples", "2", "--temperature", "0"], "gives the same sample 2 times"),
        ([], "no config.yaml that says which prompts"),
        (["data=nothing"], "nothing"),
        (["data=jsonl", "data.source.path=nowhere.jsonl", "reward=gsm8k"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_evaluated_is_named(
    tiny_directory: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tiny_directory), "--rollout", "hf", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lightning-rlhf evaluate: ")
    assert message in err


def _with_vllm(model: Path, where: list[str], out: Path) -> int:
    import contextlib

    with out.open("w") as file, contextlib.redirect_stdout(file):
        return main([str(model), *where, *FLAGS[2:], "--json"])


def test_vllm_and_transformers_answer_alike(
    tmp_path: Path, tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    where = prompts(tmp_path)
    slow = run(capsys, str(tiny_directory), *where, *FLAGS)
    # in a process of its own: an engine keeps its parallel state in module globals
    (status,) = run_distributed(
        _with_vllm, 1, tiny_directory, where, tmp_path / "out.json", init_process_group=False, timeout=180
    )
    assert status == 0
    fast = json.loads((tmp_path / "out.json").read_text().splitlines()[-1])
    assert fast["rollout"] == "vllm"
    for name in ("all", "tasks"):
        assert fast[name] == slow[name]  # greedy, fp32


def test_without_a_length_a_model_has_no_more_than_its_positions(tmp_path: Path, tiny_directory: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_directory)
    for positions, expected in ((256, 256), (100_000, 2048)):
        config.max_position_embeddings = positions
        config.save_pretrained(tmp_path)
        assert _positions(str(tmp_path)) == expected
