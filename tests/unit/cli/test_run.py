from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.cli.run import CONFIG_FILE, build, keep_earlier_run, save_config
from lightning_rlhf.cli.show_config import compose_run, main
from lightning_rlhf.cli.summary import summary_lines
from lightning_rlhf.cli.targets import ConfigError
from lightning_rlhf.cli.validate import Inspection


def of(folder: Path, ckpt_path: str | None = None) -> DictConfig:
    return OmegaConf.create({"run_dir": str(folder), "ckpt_path": ckpt_path})


def earlier_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / CONFIG_FILE).write_text("seed: 1\n")
    (folder / "metrics.csv").write_text("1\n")
    return folder


def test_an_earlier_run_is_kept_aside(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "run")
    assert keep_earlier_run(of(folder)) == tmp_path / "run.1"
    assert (tmp_path / "run.1" / "metrics.csv").exists()
    assert not folder.exists()
    earlier_run(folder)
    assert keep_earlier_run(of(folder)) == tmp_path / "run.2"


def test_a_run_that_goes_on_stays_in_its_folder(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "run")
    assert keep_earlier_run(of(folder, ckpt_path="last")) is None
    assert (folder / "metrics.csv").exists()


def test_a_folder_that_holds_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert keep_earlier_run(of(tmp_path)) is None
    assert keep_earlier_run(of(tmp_path / "absent")) is None
    assert (tmp_path / "notes.txt").exists()


def test_the_resolved_configuration_is_written_and_an_earlier_one_kept(tmp_path: Path) -> None:
    cfg = compose_run([f"run_dir={tmp_path}", "seed=5"])
    save_config(cfg)
    written = yaml.safe_load((tmp_path / CONFIG_FILE).read_text())
    assert list(written)[:4] == ["name", "run_dir", "seed", "ckpt_path"]
    assert written["data"]["source"]["seed"] == 5  # ${seed}, resolved
    save_config(cfg)
    assert [file.name for file in tmp_path.iterdir()] == [CONFIG_FILE]
    cfg.seed = 6
    save_config(cfg)
    assert yaml.safe_load((tmp_path / CONFIG_FILE).read_text())["seed"] == 6
    assert yaml.safe_load((tmp_path / "config.1.yaml").read_text())["seed"] == 5


def test_what_a_constructor_refuses_names_its_key() -> None:
    cfg = compose_run(["data.max_prompt_tokens=0"])
    with pytest.raises(ConfigError, match=r"^data: max_prompt_tokens must be at least 1, got 0\.$"):
        build("data", cfg)


def test_the_summary_says_what_runs() -> None:
    cfg = compose_run(
        ["experiment=grpo-smollm2-1n2r-fsdp2_rl", "algorithm.mini_batch_size=16", "algorithm.num_epochs=2"]
    )
    lines = summary_lines(cfg, Inspection(cfg).values, world_size=2, moved_to=Path("outputs/x.1"))
    assert lines["algorithm"] == "GRPO on models/SmolLM2-135M-Instruct"
    assert lines["each step"] == "16 prompts x 4 rollouts = 64 rollouts, 8 optimizer steps of 16"
    assert lines["rollout"] == "VLLMRollout, weights by WeightSync"
    assert lines["trainer"] == "FSDP2RLStrategy, 2 processes on cpu, precision bf16-mixed"
    assert lines["folder"] == "outputs/grpo-smollm2-1n2r-fsdp2_rl (an earlier run is now in outputs/x.1)"
    assert "goes on from" not in lines


def test_show_config_prints_values_and_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithm.clip_high=0.28"]) == 0
    out, err = capsys.readouterr()
    shown = yaml.safe_load(out)
    assert (shown["algorithm.clip_high"], shown["algorithm.clip_low"]) == (0.28, None)
    assert "trainer.num_nodes" not in shown  # Lightning's own default
    assert err == ""
    assert main(["rollout=tools", "rollout.mode=server", "rollout.max_staleness=1"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["rollout.max_staleness"] == 1
    assert shown["rollout.environment.tools"] == ["lightning_rlhf.environments.tools.Calculator"]  # objects, by kind
    assert shown["rollout.environment.parse"].endswith("parse_tool_calls")
    assert main(["algorithm.clip_hi=0.28"]) == 2
    assert "algorithm.clip_hi: unknown; did you mean algorithm.clip_high?" in capsys.readouterr().err
    assert main(["algorithm=nothing"]) == 2
    assert capsys.readouterr().err.startswith("lightning-rlhf show-config: algorithm=nothing: unknown;")
