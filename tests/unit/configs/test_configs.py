"""Every YAML file composes, passes validation, and gives the parts of a run."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from omegaconf import DictConfig
from support.tiny import write_tiny_model, write_tiny_reward_model

from lightning_rlhf.cli.run import build, build_trainer
from lightning_rlhf.cli.show_config import compose_run, flatten
from lightning_rlhf.cli.validate import Inspection, validate
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.modules import GRPO, PPO
from lightning_rlhf.strategies import MegatronRLStrategy

SNAPSHOT = Path(__file__).with_name("default.yaml")
CONFIGS = Path(str(files("lightning_rlhf.configs")))
# sweep/ holds files for `wandb sweep`
GROUPS = sorted(
    folder.name
    for folder in CONFIGS.iterdir()
    if folder.is_dir() and not folder.name.startswith("_") and folder.name != "sweep"
)
OPTIONS = sorted((group, file.stem) for group in GROUPS for file in (CONFIGS / group).glob("*.yaml"))
NEEDS = {
    # what an option asks of the command line
    ("data", "jsonl"): ["data.source.path={folder}/prompts.jsonl", "reward=gsm8k"],
    ("reward", "function"): ["reward._target_=lightning_rlhf.rewards.gsm8k_reward"],
    ("reward", "model"): ["reward.model={folder}/judge"],
    ("reward", "remote"): ["reward.url=http://localhost:1/score"],
    ("strategy", "megatron_rl"): ["trainer.devices=2"],
    ("strategy", "ulysses_rl"): ["trainer.devices=2"],
    ("weight_sync", "shm"): ["rollout=vllm_server"],
    # Trainer refuses an accelerator that the machine lacks
    ("trainer", "gpu"): ["trainer.accelerator=cpu"],
}
RECIPES = [option for group, option in OPTIONS if group == "experiment" and "-qwen3_" in option]
"""For real models, which are not here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("configs")
    write_tiny_model(folder / "model")
    write_tiny_reward_model(folder / "judge")
    (folder / "prompts.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    return folder


def composed(folder: Path, *overrides: str) -> DictConfig:
    return compose_run([f"model.path={folder / 'model'}", f"run_dir={folder / 'run'}", *overrides])


def recipe(name: str, folder: Path, *overrides: str) -> list[str]:
    return [
        f"experiment={name}",
        f"data.source.path={folder / 'prompts.jsonl'}",
        f"run_dir={folder / 'run'}",
        *overrides,
    ]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_file_composes_and_instantiates(
    group: str, option: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = [need.format(folder=folder) for need in NEEDS.get((group, option), [])]
    if option in RECIPES:
        cfg = compose_run(recipe(option, folder, "trainer.accelerator=cpu"))
    else:
        cfg = composed(folder, f"{group}={option}", *needs)
    validate(cfg)
    assert isinstance(build("data", cfg), PromptDataModule)
    module = build("algorithm", cfg)
    assert isinstance(module, (GRPO, PPO))
    optimizer = module.actor_config.optimizer
    assert optimizer is not None
    assert isinstance(optimizer([torch.nn.Parameter(torch.zeros(1))]), torch.optim.Optimizer)
    # started by torchrun, Trainer takes any number of processes without starting them
    for name, value in {"LOCAL_RANK": 0, "RANK": 0, "WORLD_SIZE": _processes(cfg)}.items():
        monkeypatch.setenv(name, str(value))
    trainer = build_trainer(cfg)
    assert isinstance(trainer, pl.Trainer)
    names = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    assert {cfg.rollout["_target_"].rpartition(".")[2], "WeightSync", "RLCheckpoint", "RunReport"} <= set(names)


def _processes(cfg: DictConfig) -> int:
    return int(cfg.trainer.devices) * int(cfg.trainer.get("num_nodes", 1))


def test_no_omegaconf_object_reaches_a_part(folder: Path) -> None:
    cfg = composed(folder, "data.source.task_config={min_terms: 2, max_terms: 2}", "rollout.stop=[a, b]")
    source = build("data", cfg).source
    assert type(source.task_config) is dict
    rollout = build("rollout", cfg)
    assert rollout.sampling.stop == ("a", "b")
    assert all(type(word) is str for word in rollout.sampling.stop)


def test_dr_grpo_is_grpo_with_three_changes(folder: Path) -> None:
    cfg = composed(folder, "algorithm=dr_grpo", "rollout.max_new_tokens=33")
    module = build("algorithm", cfg)
    assert (module.normalize_std, module.aggregation, module.norm_length) == (False, "seq-mean-token-sum-norm", 33)
    plain = build("algorithm", composed(folder))
    assert (plain.normalize_std, plain.aggregation, plain.norm_length) == (True, "token-mean", None)


def test_the_family_is_grpo_with_parts_exchanged(folder: Path) -> None:
    def parts(name: str) -> tuple[object, ...]:
        cfg = composed(folder, f"algorithm={name}")
        module = build("algorithm", cfg)
        assert isinstance(module, GRPO)
        return cfg.algorithm.get("advantage"), module.objective.func.__name__, module.aggregation  # type: ignore[attr-defined]

    assert parts("dapo") == (None, "ppo_clip", "token-mean")
    assert parts("gspo") == (None, "gspo", "seq-mean-token-mean")
    assert parts("cispo") == (None, "cispo", "token-mean")
    assert parts("rloo") == ("rloo", "reinforce", "seq-mean-token-sum")
    assert parts("reinforce_plus_plus") == ("reinforce_plus_plus", "ppo_clip", "token-mean")
    dapo = build("algorithm", composed(folder, "algorithm=dapo", "rollout.max_new_tokens=64"))
    assert (dapo.overlong_max_tokens, dapo.overlong_cache_tokens) == (64, 32)
    assert dapo.objective.keywords == {"clip_low": 0.2, "clip_high": 0.28}


def test_a_part_may_be_a_function_of_the_users(folder: Path) -> None:
    loss = "{_target_: lightning_rlhf.algorithms.losses.reinforce, _partial_: true, ratio_cap: 3.0}"
    cfg = composed(folder, f"algorithm.policy_loss={loss}", "algorithm.advantage_args={eps: 1e-4}")
    validate(cfg)
    module = build("algorithm", cfg)
    new, one = torch.tensor([-0.5]), torch.ones(1)
    loss_output = module.objective(new, new - 9.0, one, one.bool(), cu_seqlens=torch.tensor([0, 1]))
    assert loss_output.terms.tolist() == [1.5]  # capped weight 3, advantage 1, log-prob -0.5


def test_the_seed_reaches_all_that_is_random(folder: Path) -> None:
    cfg = composed(folder, "seed=7")
    data = build("data", cfg)
    assert (data.seed, data.source.seed) == (7, 7)
    assert build("algorithm", cfg).seed == 7
    assert build("rollout", cfg).sampling.seed == 7


@pytest.mark.parametrize("file", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda file: file.stem)
def test_an_experiments_name_says_what_it_runs(file: Path, folder: Path) -> None:
    match = re.fullmatch(
        r"(?P<algorithm>\w+)-(?P<model>[\w.]+)-(?P<nodes>\d+)n(?P<ranks>\d+)r-"
        r"(?P<strategy>auto|ddp|[a-z0-9]+_rl)(?P<sizes>(_[a-z]+\d+)*)",
        file.stem,
    )
    assert match, "experiments are named <algorithm>-<model>-<nodes>n<ranks>r-<strategy>[_<axis><size>...].yaml"
    cfg = compose_run([f"experiment={file.stem}"])
    values = Inspection(cfg).values
    assert cfg.name == file.stem
    assert cfg.run_dir == f"outputs/{file.stem}"
    assert values["trainer.num_nodes"] == int(match["nodes"])
    assert values["trainer.num_nodes"] * values["trainer.devices"] == int(match["ranks"]) * int(match["nodes"])
    assert chosen_algorithm(file) == match["algorithm"]
    strategy = cfg.strategy if isinstance(cfg.strategy, str) else cfg.strategy["_target_"].rpartition(".")[2]
    assert strategy.lower().startswith(match["strategy"].replace("_", ""))
    axes = MegatronRLStrategy.axis_arguments()
    for axis, size in re.findall(r"_([a-z]+)(\d+)", match["sizes"]):
        assert values[f"strategy.{axes[axis]}"] == int(size)


def chosen_algorithm(file: Path) -> str:
    """The experiment's own choice, else that of the experiment that it goes out from, else the default."""
    parts = yaml.safe_load(file.read_text())["defaults"]
    for part in parts:
        if isinstance(part, dict) and "override /algorithm" in part:
            return str(part["override /algorithm"])
    for part in parts:
        if isinstance(part, str) and part != "_self_":
            return chosen_algorithm(file.with_name(f"{part}.yaml"))
    return "grpo"


def test_the_default_configuration_is_the_committed_one() -> None:
    """Write it anew, if the change is meant: ``lightning-rlhf show-config > tests/unit/configs/default.yaml``."""
    found: dict[str, Any] = flatten(Inspection(compose_run([])))
    committed = yaml.safe_load(SNAPSHOT.read_text(encoding="utf-8"))
    assert found == committed, "if meant: lightning-rlhf show-config > tests/unit/configs/default.yaml"


@pytest.mark.parametrize(
    "experiment", [option for group, option in OPTIONS if group == "experiment" and "-qwen3_" not in option]
)
def test_data_and_reward_of_an_experiment_can_be_exchanged(experiment: str, folder: Path) -> None:
    """Nothing that an experiment says belongs to one data source or reward alone."""
    source = f"data.source.path={folder / 'prompts.jsonl'}"
    overrides = [f"experiment={experiment}", "model.path=anywhere", "data=jsonl", source, "reward=gsm8k"]
    assert Inspection(compose_run(overrides)).problems == []
