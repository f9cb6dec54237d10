"""What is typed on the command line: made acceptable to hydra, and explained when hydra refuses it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from hydra.errors import MissingConfigException

from lightning_rlhf.cli.groups import CONFIGS
from lightning_rlhf.cli.nearest import nearest_name
from lightning_rlhf.cli.schema import RunConfig

_PLAIN = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)=")


def allow_defaults(arguments: Sequence[str]) -> list[str]:
    """Marks each plain ``key=value`` as one that may be absent from the YAML files (``++key=value``).

    Defaults live in constructors, so most valid keys stand in no YAML file, and hydra alone would refuse them. Whether
    a key is valid is then decided by ``validate`` against the signatures.

    Args:
        arguments: of the command, flags among them.

    Returns:
        The same, with group choices, hydra's own keys, and the keys of the root left as they are.
    """
    roots = {field.name for field in dataclasses.fields(RunConfig)}
    folders = [Path(value) for flag, value in pairwise(arguments) if flag in ("--config-dir", "-cd")]
    changed = []
    for argument in arguments:
        match = _PLAIN.match(argument)
        key = match[1] if match else ""
        kept = key in roots or key.partition(".")[0] == "hydra" or _is_group(key, folders)
        changed.append(argument if not key or kept else f"++{argument}")
    return changed


def _is_group(key: str, folders: Sequence[Path]) -> bool:
    return "." not in key and ((files(CONFIGS) / key).is_dir() or any((folder / key).is_dir() for folder in folders))


def explain(error: Exception) -> str:
    """An error of composing, in one line, with the nearest option where one was not found."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        best = nearest_name(option, error.options)
        meant = f"did you mean {group}={best}? " if best else ""
        return f"{group}={option}: unknown; {meant}Known: {', '.join(sorted(error.options))}."
    lines = [str(error), str(error.__cause__ or "")]
    return " ".join(" ".join(lines).split()) or type(error).__name__
