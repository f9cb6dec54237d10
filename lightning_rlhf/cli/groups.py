"""The YAML files that the package offers, by group."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.cli.targets import ConfigError, load_target

CONFIGS = "lightning_rlhf.configs"


def group_options(group: str) -> dict[str, DictConfig]:
    """The files of a group: option name to content, uncomposed; empty if there is no such group."""
    folder: Traversable = files(CONFIGS) / group
    if not folder.is_dir():
        return {}
    found = {}
    for file in folder.iterdir():
        if file.name.endswith(".yaml"):
            content = OmegaConf.create(file.read_text(encoding="utf-8"))
            if isinstance(content, DictConfig):
                found[file.name.removesuffix(".yaml")] = content
    return dict(sorted(found.items()))


def options_that_take(group: str, name: str) -> dict[str, str]:
    """Which options of a group have a component with this argument.

    Args:
        group: the group.
        name: the argument.

    Returns:
        ``group=option`` to the option's ``_target_``.
    """
    takers = {}
    for option, content in group_options(group).items():
        path = content.get("_target_")
        if path is None:
            continue
        try:
            target = load_target(str(path))
        except ConfigError:  # an option whose package is not installed takes nothing here
            continue
        if name in target.parameters:
            takers[f"{group}={option}"] = target.path
    return takers
