"""The command ``lightning-rlhf show-config``: every key of a run with its value."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.cli.groups import CONFIGS
from lightning_rlhf.cli.overrides import allow_defaults, explain
from lightning_rlhf.cli.validate import Inspection


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """The configuration that ``lightning-rlhf train`` with these arguments runs."""
    with initialize_config_module(CONFIGS, version_base="1.3"):
        return compose("train", overrides=allow_defaults(overrides))


def flatten(found: Inspection) -> dict[str, Any]:
    """Every dotted key with its resolved value, and the defaults of this package's own components.

    What other packages default to is theirs to change, and is left out unless the configuration sets it.
    """
    flat: dict[str, Any] = {}
    for key, value in found.values.items():
        foreign = key in found.default_of and not found.default_of[key].path.startswith("lightning_rlhf.")
        if not foreign and f"{key}._target_" not in found.values:  # a component's arguments have keys of their own
            flat[key] = _plain(value)
    return flat


def _plain(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return "???"
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    named = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)  # YAML has no objects
    return f"{named.__module__}.{named.__qualname__}"


def main(arguments: Sequence[str]) -> int:
    """Prints the keys as YAML, and what is wrong with them on stderr.

    Returns:
        The exit status: 2 if something is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf show-config",
        description="Prints every key of a run with its value, the constructors' defaults included, as YAML.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of train, such as experiment=NAME")
    try:
        found = Inspection(compose_run(parser.parse_args(arguments).overrides))
    except HydraException as error:
        print(f"lightning-rlhf show-config: {explain(error)}", file=sys.stderr)
        return 2
    print(yaml.safe_dump(flatten(found), sort_keys=False, width=120), end="", flush=True)
    for problem in found.problems:
        print(f"lightning-rlhf show-config: {problem}", file=sys.stderr)
    return 2 if found.problems else 0
