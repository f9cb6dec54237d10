"""One run: from a composed configuration to ``Trainer.fit``."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.callbacks.rollout import RolloutCallback
from lightning_rlhf.cli.run_records import RecordError
from lightning_rlhf.cli.schema import RunConfig
from lightning_rlhf.cli.summary import print_summary
from lightning_rlhf.cli.targets import ConfigError
from lightning_rlhf.cli.validate import validate

CONFIG_FILE = "config.yaml"
"""In the run's folder: the configuration, resolved."""


def run(cfg: DictConfig) -> None:
    """Checks the configuration, builds the run's parts and trains.

    Nothing that takes memory or time is loaded before the whole configuration has been checked.

    Args:
        cfg: the composed configuration.

    Raises:
        ConfigError: if it cannot be run.
    """
    # of Lightning 2.6 about PyTorch's own names, four times in every run: nothing that a user could mend
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    values = validate(cfg)
    moved = keep_earlier_run(cfg)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    data = build("data", cfg)
    module = build("algorithm", cfg)
    trainer = build_trainer(cfg)
    save_config(cfg)
    log_config(cfg, trainer)
    print_summary(cfg, values, trainer, moved_to=moved)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt_path)
    finally:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RolloutCallback):
                callback.shutdown()


def build(key: str, cfg: DictConfig, **arguments: Any) -> Any:
    """Builds the component at a key; what it is given are plain Python values, never OmegaConf's.

    Args:
        key: dotted key of a node with ``_target_``, or of a plain value, which is returned as it is.
        cfg: the configuration.
        **arguments: further arguments of the component.

    Raises:
        ConfigError: if the component refuses its arguments, or the package that it needs is not installed.
    """
    node = OmegaConf.select(cfg, key)
    if not isinstance(node, DictConfig):
        return node
    try:
        return instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, (ValueError, TypeError, ImportError, OSError, MisconfigurationException)):
            raise ConfigError(f"{key}: {' '.join(str(error.__cause__).split())}") from error
        raise


def build_trainer(cfg: DictConfig) -> pl.Trainer:
    """The Trainer with strategy, loggers and callbacks."""
    callbacks = [f"callbacks.{name}" for name, node in (cfg.callbacks or {}).items() if node is not None]
    parts = [build(key, cfg) for key in ("rollout", "weight_sync", *callbacks)]
    loggers = [
        build(f"logger.{name}", cfg, **_continued(cfg, node))
        for name, node in (cfg.logger or {}).items()
        if node is not None
    ]
    trainer: pl.Trainer = build(
        "trainer",
        cfg,
        strategy=build("strategy", cfg),
        logger=loggers or False,
        callbacks=[part for part in parts if part is not None],
    )
    return trainer


def _continued(cfg: DictConfig, logger: DictConfig) -> dict[str, Any]:
    """What a W&B logger is told of the run that it goes on in; nothing for other loggers, or a run that starts anew."""
    from lightning_rlhf.cli.run_checkpoints import find_checkpoint, wandb_run_id

    is_wandb = str(logger.get("_target_", "")).endswith("WandbLogger")
    if cfg.ckpt_path is None or not is_wandb or logger.get("id") is not None:
        return {}
    try:
        checkpoint = find_checkpoint(Path(cfg.run_dir if cfg.ckpt_path == "last" else cfg.ckpt_path))
    except RecordError:
        return {}  # what is wrong with ckpt_path is the Trainer's to say
    run_id = wandb_run_id(checkpoint)
    return {} if run_id is None else {"id": run_id, "resume": "allow"}


@rank_zero_only
def keep_earlier_run(cfg: DictConfig) -> Path | None:
    """Moves what an earlier run left in ``run_dir`` aside, if this one starts anew.

    Two runs in one folder would mix their records, and ``ckpt_path=last`` could take up the wrong one's checkpoint.

    Returns:
        Where it is now, ``<run_dir>.1`` or the next free number; None if there was nothing, or the run goes on.
    """
    folder = Path(cfg.run_dir).resolve()
    if cfg.ckpt_path is not None or not (folder / CONFIG_FILE).exists():
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    return Path(cfg.run_dir).with_name(target.name)


def log_config(cfg: DictConfig, trainer: pl.Trainer) -> None:
    """Gives loggers the resolved configuration, so that runs can be compared by it; rank 0's alone take it."""
    resolved = OmegaConf.to_container(cfg, resolve=True)
    for logger in trainer.loggers:
        logger.log_hyperparams(resolved)  # type: ignore[arg-type]


@rank_zero_only
def save_config(cfg: DictConfig) -> None:
    """Writes the resolved configuration into ``run_dir``; keeps that of the run which is resumed, if it differs."""
    file = Path(cfg.run_dir) / CONFIG_FILE
    resolved = OmegaConf.to_container(cfg, resolve=True)
    in_order = {field.name: resolved[field.name] for field in dataclasses.fields(RunConfig)}  # type: ignore[index, call-overload]
    text = yaml.safe_dump(in_order, sort_keys=False, width=120)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.read_text(encoding="utf-8") != text:
        number = 1
        while (kept := file.with_name(f"config.{number}.yaml")).exists():
            number += 1
        file.rename(kept)
    file.write_text(text, encoding="utf-8")
