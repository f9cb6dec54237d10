"""Sizes of published models, so that a plan of a recipe needs neither the network nor the model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig, PretrainedConfig

_FOLDER = "architectures"


def model_config(path: str | Path) -> PretrainedConfig:
    """The configuration of a model, from its directory, from this machine's cache, or from the package's own files.

    Args:
        path: a directory with a ``config.json``, or the id of a model on a hub; nothing is fetched. For an id that is
            not cached, ``cli/architectures/`` may hold its sizes, each file naming where they are published.

    Raises:
        OSError: if there is no such configuration.
        ValueError: if it is none of a known kind of model.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except OSError:
        known = _known(str(path))
        if known is None:
            raise
        return known
    return config


def known_models() -> list[str]:
    """Ids of the models whose sizes the package holds."""
    names = [file.name for file in (files(__package__) / _FOLDER).iterdir()]
    return sorted(name.removesuffix(".yaml").replace("--", "/") for name in names if name.endswith(".yaml"))


def _known(model_id: str) -> PretrainedConfig | None:
    if model_id not in known_models():
        return None
    file = files(__package__) / _FOLDER / f"{model_id.replace('/', '--')}.yaml"
    numbers: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    config: PretrainedConfig = AutoConfig.for_model(**numbers)
    return config
