"""docs/algorithms.md lists what exists, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from lightning_rlhf.algorithms import advantages, losses, registry
from lightning_rlhf.algorithms.aggregation import AggregationMode

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def _first_column(heading: str) -> set[str]:
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)`", section, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        (
            "Advantages",
            set(advantages.__all__) - {"whiten", "response_advantages", "token_level_rewards"},
        ),
        ("Policy losses", set(losses.__all__)),
        ("From terms to one loss", set(get_args(AggregationMode))),
        ("Rollout corrections", {"none", *registry._CORRECTIONS}),
    ],
)
def test_every_table_has_a_row_for_each_function(heading: str, expected: set[str]) -> None:
    assert _first_column(heading) == expected


def test_every_configuration_is_named() -> None:
    for file in (Path(__file__).parents[2] / "configs" / "algorithm").glob("*.yaml"):
        assert f"`{file.stem}`" in TEXT


@pytest.mark.parametrize("heading", ["Advantages", "Policy losses"])
def test_every_row_says_formula_source_arguments_who_else_has_it_and_where_it_differs(heading: str) -> None:
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert [name.split(" (")[0] for name in rows[0]][2:] == [
        "source",
        "arguments",
        "also in",
        "where others differ",
    ]
    for row in rows:
        assert len(row) == len(rows[0])
        assert all(row[:3])
