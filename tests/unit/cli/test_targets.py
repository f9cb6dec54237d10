from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional, Union

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlhf.cli.targets import ConfigError, conforms, describe, load_target

BETAS = tuple[float, float]


@pytest.mark.parametrize(
    ("value", "hint", "right"),
    [
        (1, int, True),
        (1.0, int, False),
        (True, int, False),
        ("1", int, False),
        (1, float, True),
        (1e-6, float, True),
        (True, float, False),
        ("abc", float, False),
        (True, bool, True),
        (1, bool, False),
        ("a", str, True),
        (1, str, False),
        (None, int, False),
        (None, int | None, True),
        (None, Optional[int], True),  # noqa: UP045
        ("abc", Union[float, torch.Tensor], False),  # noqa: UP007
        (0.1, Union[float, torch.Tensor], True),  # noqa: UP007
        ("k3", Literal["k1", "k3"], True),
        ("k4", Literal["k1", "k3"], False),
        (1, Literal[True], False),
        ("a/b", str | Path, True),
        ("a/b", Path, True),
        (3, Path, False),
        ([1, 2], Sequence[int], True),
        ([1, "2"], Sequence[int], False),
        ("ab", Sequence[str], False),
        ([0.9, 0.999], BETAS, True),
        ([0.9], BETAS, False),
        ([0.9, "x"], BETAS, False),
        ([1, 2, 3], tuple[int, ...], True),
        ({"a": 1}, dict[str, int], True),
        ({"a": "b"}, dict[str, int], False),
        ({"a": 1}, Mapping[str, Any], True),
        ({"a": 1}, int, False),
        ("adam", Callable[[Any], torch.optim.Optimizer], False),
        (3, torch.nn.Module, False),
        ("a", str | torch.nn.Module, True),
        (object, Any, True),
    ],
)
def test_conforms(value: Any, hint: Any, right: bool) -> None:
    assert conforms(value, hint) is right


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | None, "int or null"),
        (Union[float, torch.Tensor], "float"),  # noqa: UP007
        (Literal["k1", "k3"], "'k1' or 'k3'"),
        (Sequence[str], "list"),
        (str | Path, "str or path"),
        (dict[str, Any], "mapping"),
        (torch.nn.Module, "a component (_target_) that gives Module"),
    ],
)
def test_describe(hint: Any, words: str) -> None:
    assert describe(hint) == words


def test_a_signature_is_read_with_defaults_and_types() -> None:
    target = load_target("support.cli_parts.Algorithm")
    assert target.default("num_epochs") == 1
    assert target.hints["estimator"] == Literal["k1", "k3"]
    assert target.hints["anything"] is Any  # its type is imported for type checkers only, the others are still read
    assert not target.open_ended


def test_the_trainers_own_signature_is_seen_through_its_decorator() -> None:
    target = load_target("lightning.pytorch.Trainer")
    assert target.default("devices") == "auto"
    assert not target.open_ended
    assert conforms(2, target.hints["devices"])
    assert not conforms(2.5, target.hints["num_nodes"])
    assert pl.Trainer.__name__ == "Trainer"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module.Thing", "no_such_module"),
        ("support.cli_parts.Algoritm", "Algoritm"),
        ("math.pi", "not a class"),
    ],
)
def test_what_cannot_be_loaded_is_named(path: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        load_target(path)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")
