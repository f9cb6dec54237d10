"""What a ``_target_`` takes: its parameters, their defaults and types, read from the signature."""

from __future__ import annotations

import inspect
import logging
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import Any, Literal, Union, get_args, get_origin

from hydra.utils import get_object

HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
"""Keys that hydra itself reads in a component."""
_COMPONENT = "a component (_target_)"
_CALLABLE: Any = get_origin(Callable[..., Any])


class ConfigError(ValueError):
    """The configuration cannot be run; the message says which key and what to do."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The class or function that a component names.

    Attributes:
        path: its import path.
        parameters: those that can be given by name.
        hints: their types, as far as they can be resolved.
        open_ended: whether it takes ``**kwargs``, or has no readable signature.
    """

    path: str
    parameters: Mapping[str, inspect.Parameter] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    open_ended: bool = False

    def default(self, name: str) -> Any:
        """The constructor's default; ``inspect.Parameter.empty`` if it must be given."""
        return self.parameters[name].default


@cache
def load_target(path: str) -> Target:
    """Imports what ``path`` names and reads its signature.

    Raises:
        ConfigError: if it cannot be imported or called.
    """
    log = logging.getLogger("hydra.utils")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it would print what the ConfigError says
    try:
        found = get_object(path)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"cannot import {path!r}: {_first_line(error)}") from error
    finally:
        log.setLevel(level)
    if not callable(found):
        raise ConfigError(f"{path!r} is {type(found).__name__}, not a class or function")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some built-in functions have none
        return Target(path=path, open_ended=True)
    kinds = inspect.Parameter
    by_name = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    return Target(
        path=path,
        parameters=by_name,
        hints=_hints(found, by_name),
        open_ended=any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values()),
    )


def show(value: Any) -> str:
    """A value as YAML writes it, on one line."""
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))


def _first_line(error: Exception) -> str:
    return str(error.__cause__ or error).strip().splitlines()[0]


def _hints(found: Callable[..., Any], parameters: Iterable[str]) -> dict[str, Any]:
    function = inspect.unwrap(found.__init__ if inspect.isclass(found) else found)
    annotations: Mapping[str, Any] = getattr(function, "__annotations__", {})
    namespace: dict[str, Any] = getattr(function, "__globals__", {})
    hints = {}
    for name in parameters:
        holder = type("Holder", (), {"__annotations__": {name: annotations.get(name, Any)}})
        try:
            hints[name] = typing.get_type_hints(holder, globalns=namespace)[name]
        except (NameError, TypeError):  # a name that is imported for type checkers only
            hints[name] = Any
    return hints


def describe(hint: Any) -> str:
    """The type as a reader of a YAML file would say it."""
    if hint is type(None):
        return "null"
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(repr(value) for value in get_args(hint))
    if origin in (Union, types.UnionType):
        parts = list(dict.fromkeys(describe(part) for part in get_args(hint)))
        plain = [part for part in parts if not part.startswith(_COMPONENT)]
        return " or ".join(plain if plain not in ([], ["null"]) else parts)
    base = origin or hint
    if not inspect.isclass(base):
        return str(hint)
    if base in (bool, int, float, str):
        return str(base.__name__)
    if issubclass(base, PurePath):
        return "path"
    if base in (list, tuple, set, frozenset, Sequence, Iterable, Collection):
        return "list"
    if base in (dict, Mapping, MutableMapping):
        return "mapping"
    return _COMPONENT if base is _CALLABLE else f"{_COMPONENT} that gives {base.__name__}"


def conforms(value: Any, hint: Any) -> bool:
    """Whether a plain value (not a component) can be meant by the type. Types that are not understood accept all.

    Args:
        value: None, bool, int, float, str, list or dict, as read from YAML.
        hint: a resolved annotation.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, (str, typing.TypeVar, typing.ForwardRef)):
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin is Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in parts)
    if origin in (Union, types.UnionType):
        return any(conforms(value, part) for part in parts)
    if origin is typing.Annotated:
        return conforms(value, parts[0])
    base = origin or hint
    if base is _CALLABLE:
        return False
    return not inspect.isclass(base) or _conforms_to_class(value, base, parts)


def _conforms_to_class(value: Any, base: type, parts: tuple[Any, ...]) -> bool:
    if base in (bool, int, float, str):
        return _is_scalar(value, base)
    if issubclass(base, (PurePath, Enum)):
        return isinstance(value, str)
    if isinstance(value, list):
        return _list_conforms(value, base, parts)
    if isinstance(value, dict):
        if not issubclass(dict, base):
            return False
        return len(parts) != 2 or all(conforms(k, parts[0]) and conforms(v, parts[1]) for k, v in value.items())
    return base is object  # a scalar or null where an object is needed


def _is_scalar(value: Any, base: type) -> bool:
    if base is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if base is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, base)


def _list_conforms(value: list[Any], base: type, parts: tuple[Any, ...]) -> bool:
    if issubclass(base, tuple):
        if len(parts) == 2 and parts[1] is Ellipsis:
            parts = parts[:1]
        elif parts:
            return len(value) == len(parts) and all(conforms(v, p) for v, p in zip(value, parts, strict=True))
    elif not issubclass(list, base) and not issubclass(base, (set, frozenset, Sequence)):
        return False
    return not parts or all(conforms(item, parts[0]) for item in value)
