from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.cli.targets import ConfigError
from lightning_rlhf.cli.validate import data_parallel_size, known_keys, validate

PARTS = Path(__file__).parents[2] / "support" / "cli_configs" / "experiment" / "parts.yaml"


def config(**changes: Any) -> DictConfig:
    """The run of support.cli_parts, with changes by dotted key; the key ``_drop_`` names keys that are taken out."""
    cfg = OmegaConf.load(PARTS)
    assert isinstance(cfg, DictConfig)
    del cfg["defaults"]
    cfg.merge_with({"run_dir": "out", "seed": 0, "ckpt_path": None, "strategy": "auto"})
    cfg.trainer = {"_target_": "lightning.pytorch.Trainer", "accelerator": "cpu", "devices": 1, **cfg.trainer}
    for key in changes.pop("_drop_", []):
        parent, _, name = key.rpartition(".")
        del (OmegaConf.select(cfg, parent) if parent else cfg)[name]
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        validate(config(**changes))
    return str(error.value).splitlines()


def test_a_good_configuration_passes_and_gives_values_and_defaults() -> None:
    values = validate(config(**{"algorithm.kl_coef": 0.5}))
    assert values["algorithm.kl_coef"] == 0.5
    assert values["algorithm.num_epochs"] == 1
    assert values["algorithm.optimizer.lr"] == 0.1
    assert values["algorithm.optimizer.weight_decay"] == 0.01
    assert values["rollout.num_rollouts"] == 4
    assert values["trainer.num_nodes"] == 1
    assert "trainer.strategy" not in values


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("algorithm.kl_coeff", "algorithm.kl_coef"),
        ("algo.kl_coeff", "algorithm.kl_coef"),
        ("kl_coef", "algorithm.kl_coef"),
        ("rollout.kl_coef", "algorithm.kl_coef"),
        ("algorithm.optimizer.kl_coef", "algorithm.kl_coef"),
        ("algorithm.lr", "algorithm.optimizer.lr"),
        ("algorithm.optimizer.learning_rat.lr", "algorithm.optimizer.lr"),
        ("model.pth", "model.path"),
        ("trainer.device", "trainer.devices"),
        ("callbacks.noet.every", "callbacks.note.every"),
        ("callbacks.note.evry", "callbacks.note.every"),
        ("sed", "seed"),
    ],
)
def test_g01_an_unknown_key_names_the_nearest(key: str, meant: str) -> None:
    assert problems(**{key: 1}) == [f"{key}: unknown; did you mean {meant}?"]


def test_g01_every_unknown_key_is_named_down_to_what_was_typed() -> None:
    assert problems(algo={"kl_coeff": 1, "seed_": {"x": 2}}) == [
        "algo.kl_coeff: unknown; did you mean algorithm.kl_coef?",
        (
            "algo.seed_.x: unknown; known there: algorithm, callbacks, ckpt_path, data, model, name, reward, rollout, "
            "run_dir, seed, strategy, trainer, weight_sync."
        ),
    ]


def test_a_misspelt_argument_is_found_even_where_any_is_accepted() -> None:
    logger = {"_target_": "lightning.pytorch.loggers.WandbLogger", "offline": True}
    assert problems(**{"logger.wandb": {**logger, "projct": "x"}}) == [
        "logger.wandb.projct: unknown; did you mean logger.wandb.project?"
    ]
    validate(config(**{"logger.wandb": {**logger, "tags": ["a"]}}))  # goes on to wandb.init


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("algorithm.optimizer.lr", "abc", "algorithm.optimizer.lr: expected float, got 'abc'."),
        ("algorithm.mini_batch_size", 1.5, "algorithm.mini_batch_size: expected int or null, got 1.5."),
        ("algorithm.estimator", "k4", "algorithm.estimator: expected 'k1' or 'k3', got 'k4'."),
        ("algorithm.optimizer", "adam", "algorithm.optimizer: expected a component (_target_), got 'adam'."),
        ("algorithm.kl_coef", {"x": 1}, "algorithm.kl_coef: expected float, got {'x': 1}."),
        ("rollout.stop", "\n", "rollout.stop: expected list, got '\\n'."),
        ("rollout.num_rollouts", None, "rollout.num_rollouts: expected int, got null."),
        ("seed", "1", "seed: expected int, got '1'."),
        ("strategy", 3, "strategy: expected a component (_target_), got 3."),
        ("callbacks", "all", "callbacks: expected components by name, got 'all'."),
        ("trainer.max_epochs", "two", "trainer.max_epochs: expected int or null, got 'two'."),
    ],
)
def test_types_are_checked(key: str, value: Any, problem: str) -> None:
    assert problems(**{key: value}) == [problem]


def test_what_is_missing_is_named() -> None:
    assert problems(**{"model.path": "???"}) == ["model.path: no value given (???). Set model.path=..."]
    assert problems(**{"algorithm.kl_coef": "???"}) == [
        "algorithm.kl_coef: no value given (???). Set algorithm.kl_coef=..."
    ]
    assert problems(_drop_=["data.prompts_per_step"]) == [
        "data.prompts_per_step: support.cli_parts.Data needs it. Set it."
    ]
    assert problems(_drop_=["seed"])[0] == "seed: not set. It is needed."
    assert problems(_drop_=["data._target_"])[0] == "data: has no _target_, which names the class or function."


def test_a_factory_without_partial_is_told_what_it_lacks() -> None:
    assert problems(_drop_=["algorithm.optimizer._partial_"]) == [
        (
            "algorithm.optimizer.params: torch.optim.AdamW needs it. Set it, or set algorithm.optimizer._partial_=true "
            "if it is given later."
        )
    ]


def test_a_target_that_cannot_be_imported_is_the_only_problem() -> None:
    # what its arguments may be is not known then, so nothing is said of them
    found = problems(**{"algorithm._target_": "support.cli_parts.Algoritm", "algorithm.kl_coeff": 1})
    assert len(found) == 1
    assert found[0].startswith("algorithm._target_: cannot import 'support.cli_parts.Algoritm'")


def test_an_interpolation_that_leads_nowhere_is_named() -> None:
    assert problems(**{"algorithm.out": "${nowhere.at_all}"}) == [
        "algorithm.out: Interpolation key 'nowhere.at_all' not found."
    ]


def test_the_root_decides_some_arguments_of_the_trainer() -> None:
    assert problems(**{"trainer.strategy": "ddp"}) == [
        "trainer.strategy: set strategy at the root of the configuration instead."
    ]


def test_components_in_lists_are_walked() -> None:
    weighted = "lightning_rlhf.rewards.WeightedRewards"
    gsm8k = {"_target_": "lightning_rlhf.rewards.gsm8k_reward", "_partial_": True}
    validate(_with_reward({"_target_": weighted, "rewards": [[gsm8k, 1.0], [gsm8k, 0.5]]}))
    with pytest.raises(ConfigError, match=r"reward\.rewards\.1\.0\.weigth: unknown"):
        validate(_with_reward({"_target_": weighted, "rewards": [[gsm8k, 1.0], [{**gsm8k, "weigth": 1}, 0.5]]}))


def _with_reward(reward: dict[str, Any]) -> DictConfig:
    cfg = config()
    cfg.reward = reward
    return cfg


def test_a_callback_can_be_left_out() -> None:
    validate(config(**{"callbacks.note": None, "weight_sync": None}))


def test_a_key_of_another_option_of_the_group_names_it() -> None:
    cfg = config()
    cfg.rollout = {"_target_": "lightning_rlhf.callbacks.HFRollout", "kv_cache_bytes": 1}
    with pytest.raises(ConfigError) as error:
        validate(cfg)
    assert str(error.value) == (
        "rollout.kv_cache_bytes: unknown to lightning_rlhf.callbacks.HFRollout; it belongs to rollout=tools, "
        "rollout=vllm."
    )


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ({"devices": 2}, 2),
        ({"devices": "2"}, 2),
        ({"devices": [0, 1, 2]}, 3),
        ({"devices": 2, "num_nodes": 4}, 8),
        ({"devices": "auto"}, 1),
        ({"devices": "auto", "accelerator": "gpu"}, None),
        ({"devices": -1, "accelerator": "gpu"}, None),
    ],
)
def test_data_parallel_ranks_are_read_from_the_trainer(trainer: dict[str, Any], ranks: int | None) -> None:
    cfg = config(**{f"trainer.{key}": value for key, value in trainer.items()})
    assert data_parallel_size(known_keys(cfg)) == ranks


def test_a_local_model_must_be_there() -> None:
    found = problems(**{"model.path": "models/none-of-that-name"})
    assert found == [
        (
            "model.path: there is no directory models/none-of-that-name. `lightning-rlhf prepare-model` writes "
            "SmolLM2-135M-Instruct."
        )
    ]
    validate(config(**{"model.path": "HuggingFaceTB/SmolLM2-135M-Instruct"}))
