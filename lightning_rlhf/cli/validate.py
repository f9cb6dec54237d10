"""Reads a composed configuration against the signatures that it will be passed to, before anything is loaded."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, InterpolationToMissingValueError

from lightning_rlhf.batching.checks import check_batch_sizes
from lightning_rlhf.cli.groups import options_that_take
from lightning_rlhf.cli.layout_checks import layout_problems, world_size
from lightning_rlhf.cli.nearest import did_you_mean, nearest_name
from lightning_rlhf.cli.schema import Component, Components, RunConfig
from lightning_rlhf.cli.targets import HYDRA_KEYS, ConfigError, Target, conforms, describe, load_target, show

SET_AT_THE_ROOT = {
    "trainer.strategy": "strategy",
    "trainer.callbacks": "callbacks, rollout or weight_sync",
    "trainer.logger": "logger",
}
"""Arguments of the Trainer that other keys of the root decide."""

_ABSENT = inspect.Parameter.empty


class Inspection:
    """One walk over a composed configuration.

    Args:
        cfg: the configuration, not yet resolved.

    Attributes:
        values: every valid dotted key with its value: the configuration's, else the constructor's default, else
            ``inspect.Parameter.empty``. A node that another key refers to (``${reward}``) stands there as that text.
        default_of: the target whose default a value is, for the values that the configuration does not set.
        problems: one line for each thing that is wrong.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.values: dict[str, Any] = {}
        self.default_of: dict[str, Target] = {}
        self.problems: list[str] = []
        self._unknown: list[str] = []
        self._section("", cfg, RunConfig)
        # the nearest key can only be named once all valid keys have been seen
        if not any("._target_: " in problem for problem in self.problems):
            self.problems += [explain_unknown(key, self.values, cfg) for key in self._unknown]

    def _section(self, path: str, node: DictConfig, schema: type) -> None:
        hints = get_type_hints(schema)
        for name in (field.name for field in dataclasses.fields(schema)):
            key = _join(path, name)
            if name not in node.keys():  # noqa: SIM118 ("in" itself is False for a value that is ???)
                self.values[key] = _ABSENT
                self.problems.append(f"{key}: not set. It is needed.")
            else:
                self._field(key, node, name, hints[name])
        self._unknown += [leaf for name in node if name not in hints for leaf in _leaves(_join(path, str(name)), node)]

    def _field(self, key: str, parent: DictConfig, name: str, hint: Any) -> None:
        if OmegaConf.is_missing(parent, name):
            self.values[key] = _ABSENT
            self.problems.append(f"{key}: no value given (???). Set {key}=...")
            return
        value = self._read(key, parent, name)
        if hint is Components:
            self._components(key, value)
        elif isinstance(value, DictConfig) and dataclasses.is_dataclass(hint):
            self._section(key, value, hint)  # type: ignore[arg-type]
        elif Component in (hint, *get_args(hint)):
            self._component_field(key, value, hint)
        else:
            self.values[key] = value
            self._check_type(key, value, hint)

    def _component_field(self, key: str, value: Any, hint: Any) -> None:
        if isinstance(value, DictConfig):
            self._component(key, value)
        elif not any(conforms(value, part) for part in get_args(hint) if part is not Component):
            self.problems.append(f"{key}: expected a component (_target_), got {show(value)}.")
        else:
            self.values[key] = value

    def _components(self, key: str, node: Any) -> None:
        if node is None:
            return
        if not isinstance(node, DictConfig):
            self.problems.append(f"{key}: expected components by name, got {show(node)}.")
            return
        for name in node:
            child = self._read(_join(key, str(name)), node, name)
            if isinstance(child, DictConfig) and "_target_" in child:
                self._component(_join(key, str(name)), child)
            elif child is not None:
                self._unknown += _leaves(_join(key, str(name)), node)

    def _component(self, path: str, node: DictConfig) -> None:
        if "_target_" not in node:
            self.problems.append(f"{path}: has no _target_, which names the class or function.")
            return
        try:
            target = load_target(str(node["_target_"]))
        except ConfigError as error:
            self.problems.append(f"{path}._target_: {error}.")
            return
        self.values[f"{path}._target_"] = target.path
        self._known_arguments(path, node, target)
        for name in node:
            key = _join(path, str(name))
            if name in HYDRA_KEYS or (name in target.parameters and key not in SET_AT_THE_ROOT):
                continue
            if key in SET_AT_THE_ROOT:
                self.problems.append(f"{key}: set {SET_AT_THE_ROOT[key]} at the root of the configuration instead.")
            elif not target.open_ended or nearest_name(str(name), target.parameters, at_least=0.8):
                self._unknown += _leaves(key, node)

    def _known_arguments(self, path: str, node: DictConfig, target: Target) -> None:
        given_later = bool(node.get("_partial_")) or "_args_" in node
        for name, hint in target.hints.items():
            key = _join(path, name)
            if key in SET_AT_THE_ROOT:
                continue
            if name in node.keys():  # noqa: SIM118
                self._argument(key, node, name, hint)
                continue
            self.values[key] = target.default(name)
            self.default_of[key] = target
            if target.default(name) is _ABSENT and not given_later:
                later = f", or set {path}._partial_=true if it is given later" if path.count(".") else ""
                self.problems.append(f"{key}: {target.path} needs it. Set it{later}.")

    def _argument(self, key: str, parent: DictConfig, name: str, hint: Any) -> None:
        if OmegaConf.is_missing(parent, name):
            self.values[key] = _ABSENT
            self.problems.append(f"{key}: no value given (???). Set {key}=...")
            return
        value = self._read(key, parent, name)
        if isinstance(value, (DictConfig, ListConfig)) and OmegaConf.is_interpolation(parent, name):
            raw = OmegaConf.to_container(parent, resolve=False)
            self.values[key] = raw[name] if isinstance(raw, dict) else raw
            return  # read where it stands
        self.values[key] = value
        if isinstance(value, DictConfig) and "_target_" in value:
            self._component(key, value)
        elif not self._components_in_list(key, value) and not self._is_wrong_at_its_source(parent, name):
            self._check_type(key, value, hint)

    def _is_wrong_at_its_source(self, parent: DictConfig, name: str) -> bool:
        """Whether a value comes from a key of the root (``${seed}``) that has been reported already."""
        if not OmegaConf.is_interpolation(parent, name):
            return False
        raw = OmegaConf.to_container(parent, resolve=False)
        source = str(raw[name] if isinstance(raw, dict) else "").strip("${}")
        return any(problem.startswith(f"{source}: ") for problem in self.problems)

    def _components_in_list(self, key: str, value: Any) -> bool:
        """Walks components in a list, or in lists in it (pairs of a reward and a weight); False if there are none."""
        if not isinstance(value, ListConfig):
            return False
        found = False
        for index, item in enumerate(value):
            if isinstance(item, DictConfig) and "_target_" in item:
                self._component(f"{key}.{index}", item)
                found = True
            else:
                found |= self._components_in_list(f"{key}.{index}", item)
        return found

    def _check_type(self, key: str, value: Any, hint: Any) -> None:
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        if value is not _ABSENT and not conforms(plain, hint):
            self.problems.append(f"{key}: expected {describe(hint)}, got {show(plain)}.")

    def _read(self, key: str, parent: DictConfig, name: Any) -> Any:
        try:
            return parent[name]
        except InterpolationToMissingValueError:
            return _ABSENT  # reported where the value is missing
        except InterpolationResolutionError as error:
            self.problems.append(f"{key}: {str(error).splitlines()[0]}.")
            return _ABSENT


def explain_unknown(key: str, known: dict[str, Any], cfg: DictConfig) -> str:
    """The message about a key that nothing reads: who else would, or the nearest key that something reads."""
    group, _, name = key.partition(".")
    chosen = cfg.get(group) if group in cfg else None
    path = chosen.get("_target_") if isinstance(chosen, DictConfig) else chosen
    others = [option for option, target in options_that_take(group, name).items() if target != path]
    if others:
        return f"{key}: unknown to {path}; it belongs to {', '.join(others)}."
    return f"{key}: unknown; {did_you_mean(key, known)}"


def known_keys(cfg: DictConfig) -> dict[str, Any]:
    """Every valid dotted key of a composed configuration, with its value or its default."""
    return Inspection(cfg).values


def validate(cfg: DictConfig) -> dict[str, Any]:
    """Checks keys, types and sizes of a composed configuration; loads no model and starts nothing.

    Returns:
        Every valid dotted key with its value or its default.

    Raises:
        ConfigError: with one line for each problem.
    """
    inspection = Inspection(cfg)
    if not inspection.problems:
        inspection.problems += (
            layout_problems(inspection.values, str(cfg.model.path))
            or _size_problems(inspection.values)  # counts ranks by the layout
        ) + _path_problems(cfg)
    if inspection.problems:
        raise ConfigError("\n".join(inspection.problems))
    return inspection.values


def data_parallel_size(values: dict[str, Any]) -> int | None:
    """Data-parallel ranks that the Trainer will start, or None if only the machine can say."""
    processes = world_size(values)
    # ranks that share rows count as one; whether the sizes fit the processes is checked with the layout
    axes = ("sp", "tensor_parallel", "pipeline_parallel", "context_parallel")
    sharers = math.prod(int(values.get(f"strategy.{axis}_size", 1)) for axis in axes)
    return None if processes is None else max(processes // sharers, 1)


def _size_problems(values: dict[str, Any]) -> list[str]:
    ranks = data_parallel_size(values)
    prompts, group = values.get("data.prompts_per_step"), values.get("rollout.num_rollouts")
    if ranks is None or not isinstance(prompts, int) or not isinstance(group, int):
        return []  # the module checks the same at the start of fit
    try:
        check_batch_sizes(
            prompts_per_step=prompts,
            rollouts_per_prompt=group,
            data_parallel_size=ranks,
            mini_batch_size=values.get("algorithm.mini_batch_size"),
            critic_mini_batch_size=values.get("algorithm.critic_mini_batch_size"),
            micro_batch_size=values.get("algorithm.micro_batch_size"),
            max_tokens_per_micro_batch=values.get("algorithm.max_tokens_per_micro_batch"),
        )
    except ValueError as error:
        return [str(error)]
    return []


def _path_problems(cfg: DictConfig) -> list[str]:
    found = []
    path = str(cfg.model.path)
    if (
        path.startswith(("/", ".", "~", "models/")) and not Path(path).is_dir()
    ):  # else it may be the id of a hub's model
        found.append(
            f"model.path: there is no directory {path}. `lightning-rlhf prepare-model` writes SmolLM2-135M-Instruct."
        )
    if Path.cwd().is_relative_to(Path(cfg.run_dir).resolve()):
        found.append(f"run_dir: {cfg.run_dir} is or holds the working directory; a run needs a folder of its own.")
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _leaves(key: str, parent: DictConfig) -> Iterator[str]:
    """The dotted keys under ``key``, so that a message names what was typed and not only where it starts."""
    name = key.rpartition(".")[2]
    child = None if OmegaConf.is_missing(parent, name) or OmegaConf.is_interpolation(parent, name) else parent[name]
    if isinstance(child, DictConfig) and len(child):
        for grandchild in child:
            yield from _leaves(_join(key, str(grandchild)), child)
    else:
        yield key
