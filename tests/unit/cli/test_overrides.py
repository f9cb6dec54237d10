from __future__ import annotations

from pathlib import Path

from hydra.errors import ConfigCompositionException, MissingConfigException

from lightning_rlhf.cli.overrides import allow_defaults, explain


def test_plain_keys_may_be_absent_from_the_yaml_files() -> None:
    assert allow_defaults(["algorithm.kl_coef=0.1", "algo.kl=1", "kl_coef=1"]) == [
        "++algorithm.kl_coef=0.1",
        "++algo.kl=1",
        "++kl_coef=1",
    ]


def test_the_rest_of_the_command_line_stays() -> None:
    kept = [
        "-m",
        "experiment=a",
        "algorithm=dr_grpo",
        "seed=1",
        "run_dir=x",
        "hydra.verbose=true",
        "hydra/launcher=basic",
    ]
    kept += [
        "+a.b=1",
        "++a.b=1",
        "~a.b",
        "--cfg",
        "job",
        "strategy@x=auto",
        "data=jsonl",
        "--config-dir",
        "a.b",
        "word",
    ]
    assert allow_defaults(kept) == kept


def test_groups_of_a_users_own_config_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert allow_defaults(["--config-dir", str(tmp_path), "mine=a"])[-1] == "mine=a"
    assert allow_defaults(["mine=a"]) == ["++mine=a"]


def test_it_can_be_applied_twice() -> None:
    once = allow_defaults(["a.b=1", "seed=1"])
    assert allow_defaults(once) == once


def test_a_missing_option_names_the_nearest() -> None:
    error = MissingConfigException("...", "experiment/grop", ["grpo", "ppo"])
    assert explain(error) == "experiment=grop: unknown; did you mean experiment=grpo? Known: grpo, ppo."


def test_other_errors_become_one_line() -> None:
    error = ConfigCompositionException("Could not do it.\n  Because of that")
    error.__cause__ = KeyError("x")
    assert explain(error) == "Could not do it. Because of that 'x'"
