"""The dump of a real run: complete, the same for a seed, and the same for every layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.toy import Recorder, digit_reward, toy_data, toy_module, toy_ppo, toy_trainer

from lightning_rlhf.callbacks import RolloutDump
from lightning_rlhf.callbacks.rollout_dump import sampled_rows
from lightning_rlhf.callbacks.rollout_files import dump_path, read_rows, write_rows
from lightning_rlhf.rewards import WeightedRewards
from lightning_rlhf.types import Rollouts, RolloutSequence


def length_reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    return [float(len(response)) for response in responses]


def _fit(
    root: Path, model: Path, *, strategy: str = "auto", devices: int = 1, ppo: bool = False
) -> list[dict[str, Any]]:
    recorder = Recorder()
    reward = WeightedRewards([(digit_reward, 1.0), (length_reward, 0.125)])
    trainer = toy_trainer(root, callbacks=[RolloutDump(), recorder], strategy=strategy, devices=devices)
    make = toy_ppo if ppo else toy_module
    # with two mini-batches a step reads the log-probs before its update
    changes = {"mini_batch_size": 8} if ppo else {}
    trainer.fit(make(model, reward=reward, max_rl_steps=2, **changes), toy_data())
    return recorder.steps


def _read(root: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "rollouts" / f"rl_step={step:06d}.jsonl").read_text().splitlines()]


def test_a_step_is_there_with_all_of_its_rows_and_numbers(tmp_path: Path, tiny_directory: Path) -> None:
    steps = _fit(tmp_path, tiny_directory)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        "rl_step=000001.jsonl",
        "rl_step=000002.jsonl",
    ]
    for step in steps:
        rows = _read(tmp_path, step["rl_step"])
        assert len(rows) == 16
        keys = [(row["uid"], row["sample_index"]) for row in rows]
        assert keys == sorted((uid, sample) for uid in step["uids"] for sample in range(4))
        in_order = sorted(rows, key=lambda row: (step["uids"].index(row["uid"]), row["sample_index"]))
        ids = [token for row in in_order for token in row["prompt_token_ids"] + row["response_token_ids"]]
        assert ids == step["tokens"]
        mean = sum(row["reward"] for row in rows) / 16
        assert mean == pytest.approx(step["metrics"]["reward/mean"], abs=1e-6)
        for row in rows:
            assert len(row["rollout_log_probs"]) == len(row["response_token_ids"])
            parts = row["reward_components"]
            assert parts["length_reward"] == len(row["response"])
            assert row["reward"] == pytest.approx(parts["digit_reward"] + 0.125 * parts["length_reward"], abs=1e-6)
            assert row["policy_version"] == step["versions"][0]
            assert row["finish_reason"] in ("stop", "length")
        by_group: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_group.setdefault(row["uid"], []).append(row)
        for group in by_group.values():  # GRPO by hand: centred on the group, divided by its standard deviation
            rewards = torch.tensor([row["reward"] for row in group])
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            found = torch.tensor([row["advantage"] for row in group])
            assert torch.allclose(found, expected, atol=1e-3)
            assert all(row["trained"] for row in group)


def test_the_seed_gives_the_file_and_the_layout_does_not_change_it(tmp_path: Path, tiny_directory: Path) -> None:
    _fit(tmp_path / "once", tiny_directory)
    _fit(tmp_path / "again", tiny_directory)
    run_distributed(
        _fit, 2, tmp_path / "two", tiny_directory, strategy="fsdp2_rl", devices=2, init_process_group=False, timeout=120
    )
    files = [dump_path(tmp_path / run / "rollouts", 1).read_bytes() for run in ("once", "again", "two")]
    assert files[0] == files[1] == files[2]
    second = [dump_path(tmp_path / run / "rollouts", 2).read_bytes() for run in ("once", "again")]
    assert second[0] == second[1] != files[0]


def test_ppo_writes_what_differs_from_token_to_token(tmp_path: Path, tiny_directory: Path) -> None:
    _fit(tmp_path, tiny_directory, ppo=True)
    rows = [row for row in _read(tmp_path, 1) if len(row["response_token_ids"]) > 1]
    assert rows
    for row in rows:
        assert len(row["token_advantages"]) == len(row["response_token_ids"])
        assert sum(row["token_advantages"]) / len(row["token_advantages"]) == pytest.approx(row["advantage"], abs=1e-5)
        assert len(row["old_log_probs"]) == len(row["response_token_ids"])
        # the trainer and the rollout engine see the same distribution
        assert row["old_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=1e-3)


def test_observations_a_failed_reward_and_a_skipped_row_by_hand() -> None:
    common: dict[str, Any] = {"prompt": "p", "policy_version": 3, "prompt_token_ids": [1, 2]}
    rollouts = Rollouts.from_sequences(
        [
            RolloutSequence(
                uid="a", sample_index=0, response_token_ids=[5, 6, 7], log_probs=[-0.5, -9.0, -0.25],
                response_mask=[True, False, True], token_versions=[3, 3, 4], finish_reason="stop", **common,
            ),
            RolloutSequence(
                uid="b", sample_index=1, response_token_ids=[], log_probs=[], finish_reason="skipped", **common
            ),
        ]
    )  # fmt: skip
    rollouts.rewards = torch.tensor([0.1, float("nan")])
    first, second = sampled_rows(rollouts)
    assert first["prompt_token_ids"] == [1, 2]
    assert first["response_token_ids"] == [5, 6, 7]
    assert first["response_mask"] == [True, False, True]
    assert first["rollout_log_probs"] == [-0.5, 0.0, -0.25]
    assert first["policy_version"] == [3, 4]
    assert first["reward"] == 0.100000001  # the fp32 number, in the digits that bring it back
    assert second["reward"] is None
    assert second["response_token_ids"] == []
    assert "response_mask" not in second


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dump_path(tmp_path, 3)
    write_rows(path, [{"old": True}])

    def half() -> Any:
        yield {"new": 1}
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_rows(path, half())
    assert path.read_text() == '{"old": true}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_ends_the_run_by_name(tmp_path: Path, tiny_directory: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    trainer = toy_trainer(tmp_path, callbacks=[RolloutDump(dirpath=tmp_path / "taken")])
    with pytest.raises(RuntimeError, match="could not write the rollouts of RL step 1"):
        trainer.fit(toy_module(tiny_directory), toy_data())


def test_every_so_many_steps(tmp_path: Path, tiny_directory: Path) -> None:
    with pytest.raises(ValueError, match="every_n_steps"):
        RolloutDump(every_n_steps=0)
    trainer = toy_trainer(tmp_path, callbacks=[RolloutDump(every_n_steps=2, dirpath=tmp_path / "dump")])
    trainer.fit(toy_module(tiny_directory), toy_data())
    assert sorted(path.name[-7] for path in (tmp_path / "dump").iterdir()) == ["1", "2", "4"]


def test_parquet_holds_the_rows_of_jsonl(tmp_path: Path, tiny_directory: Path) -> None:
    """PPO with several mini-batches: every optional key. The seed gives the rows, and each type is its column's."""
    rows = {}
    for name in ("jsonl", "parquet"):
        trainer = toy_trainer(tmp_path, callbacks=[RolloutDump(format=name, dirpath=tmp_path / name)])
        reward = WeightedRewards([(digit_reward, 1.0), (length_reward, 0.125)])
        trainer.fit(toy_ppo(tiny_directory, reward=reward, max_rl_steps=1, mini_batch_size=8), toy_data())
        path = dump_path(tmp_path / name, 1, name)  # type: ignore[arg-type]
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        rows[name] = read_rows(path)
    assert rows["parquet"] == rows["jsonl"]
    assert {"old_log_probs", "token_advantages", "reward_components"} <= rows["parquet"][0].keys()


def test_parquet_keeps_what_differs_from_row_to_row(tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "rl_step": 1, "prompt": "p", "response": "r\n\U0001f600", "prompt_token_ids": [1], "finish_reason": "stop",
        "response_token_ids": [5, 6], "rollout_log_probs": [-0.5, None], "trained": False, "advantage": None,
    }  # fmt: skip
    rows = [
        {**common, "uid": "a", "sample_index": 0, "reward": None, "policy_version": 3, "metadata": {"n": 1}},
        {**common, "uid": "b", "sample_index": 1, "reward": 0.1, "policy_version": [3, 4], "metadata": {},
         "response_mask": [True, False], "reward_components": {"x": None}},
        {**common, "uid": "c", "sample_index": 0, "reward": 1.0, "policy_version": [], "metadata": {"other": [None]}},
    ]  # fmt: skip
    for name in ("jsonl", "parquet"):
        write_rows(dump_path(tmp_path, 1, name), rows)  # type: ignore[arg-type]
        assert read_rows(dump_path(tmp_path, 1, name)) == rows  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="no column"):
        write_rows(dump_path(tmp_path, 2, "parquet"), [{**rows[0], "extra": 1}])


def test_a_step_has_one_file_and_a_format_that_is_none_is_refused(tmp_path: Path, tiny_directory: Path) -> None:
    old = dump_path(tmp_path / "rollouts", 1)
    write_rows(old, [])
    trainer = toy_trainer(tmp_path, callbacks=[RolloutDump(format="parquet")])
    trainer.fit(toy_module(tiny_directory, max_rl_steps=1), toy_data())
    assert [path.suffix for path in old.parent.iterdir()] == [".parquet"]
    with pytest.raises(ValueError, match="one of jsonl, parquet, got 'csv'"):
        RolloutDump(format="csv")  # type: ignore[arg-type]


def test_parquet_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"lightning_rlhf\[parquet\]"):
        RolloutDump(format="parquet")
