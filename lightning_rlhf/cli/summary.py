"""What is printed before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table


def summary_lines(
    cfg: DictConfig, values: Mapping[str, Any], *, world_size: int, moved_to: Path | None
) -> dict[str, str]:
    """The summary as label and text.

    Args:
        cfg: the configuration.
        values: every key with its value or default, as ``validate`` returns them.
        world_size: processes of the run.
        moved_to: where an earlier run's folder went, or None.
    """
    prompts, group = values.get("data.prompts_per_step"), values.get("rollout.num_rollouts")
    lines = {
        "algorithm": f"{_name(cfg, 'algorithm')} on {cfg.model.path}",
        "data": f"{_name(cfg, 'data.source') or _name(cfg, 'data')}, scored by {_name(cfg, 'reward')}",
    }
    if isinstance(prompts, int) and isinstance(group, int):
        lines["each step"] = f"{prompts} prompts x {group} rollouts = {prompts * group} rollouts, {_updates(values)}"
    lines["rollout"] = f"{_name(cfg, 'rollout')}, weights by {_name(cfg, 'weight_sync') or 'nobody'}"
    lines["trainer"] = (
        f"{_name(cfg, 'strategy')}, {world_size} process{'es' if world_size != 1 else ''} on "
        f"{values.get('trainer.accelerator')}, precision {values.get('trainer.precision') or '32-true'}"
    )
    lines["seed"] = str(cfg.seed)
    lines["folder"] = f"{cfg.run_dir}{f' (an earlier run is now in {moved_to})' if moved_to else ''}"
    if cfg.ckpt_path is not None:
        lines["goes on from"] = str(cfg.ckpt_path)
    return lines


def _updates(values: Mapping[str, Any]) -> str:
    step = values["data.prompts_per_step"] * values["rollout.num_rollouts"]
    mini_batch, epochs = values.get("algorithm.mini_batch_size"), values.get("algorithm.num_epochs")
    steps = step // (mini_batch or step) * (epochs if isinstance(epochs, int) else 1)
    return f"{steps} optimizer step{'s' if steps != 1 else ''} of {mini_batch or step}"


def _name(cfg: DictConfig, key: str) -> str:
    node = OmegaConf.select(cfg, key)
    nodes = node if OmegaConf.is_list(node) else [node]
    names = []
    for one in nodes:
        path = one.get("path", one["_target_"]) if OmegaConf.is_dict(one) else one
        names.append(str(path).rpartition(".")[2] if path is not None else "")
    return ", ".join(names)


@rank_zero_only
def print_summary(cfg: DictConfig, values: Mapping[str, Any], trainer: pl.Trainer, *, moved_to: Path | None) -> None:
    """Prints what is about to run, once."""
    table = Table(title=str(cfg.name), title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    world_size = trainer.num_devices * trainer.num_nodes  # trainer.world_size is 1 until the processes have started
    for label, text in summary_lines(cfg, values, world_size=world_size, moved_to=moved_to).items():
        table.add_row(label, text)
    Console().print(table)
