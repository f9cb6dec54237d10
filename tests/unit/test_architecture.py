"""docs/architecture.md walks through code that exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOPS = re.findall(
    r"^\| \d+ \|[^|]*\| `([\w/]+\.py)` \| `([\w.]+)` \|$",
    (ROOT / "docs" / "architecture.md").read_text(),
    flags=re.MULTILINE,
)


def test_the_walk_is_found_in_the_page() -> None:
    assert len(HOPS) == 30


@pytest.mark.parametrize(("file", "name"), HOPS, ids=[name for _, name in HOPS])
def test_every_hop_is_defined_in_the_file_that_the_page_names(file: str, name: str) -> None:
    module_path = file if file.startswith("lightning_rlhf/") else f"lightning_rlhf/{file}"
    module = importlib.import_module(module_path.removesuffix(".py").replace("/", "."))
    owner, _, attribute = name.rpartition(".")
    found = getattr(module, owner).__dict__[attribute] if owner else getattr(module, attribute)
    assert found.__module__ == module.__name__
    assert (ROOT / file).is_file()
