"""docs/rewards.md lists what exists."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from lightning_rlhf import rewards

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
CONFIGS = {file.name.removesuffix(".yaml") for file in (files("lightning_rlhf.configs") / "reward").iterdir()}


def test_every_config_is_listed_beside_a_reward_that_exists() -> None:
    rows = re.findall(r"^\| (a function|`\w+`) \| `reward=(\w+)` \|", TEXT, re.MULTILINE)
    assert {config for _, config in rows} == CONFIGS
    for name, config in rows:
        assert name == "a function" if config == "function" else name.strip("`") in rewards.__all__


def test_every_public_reward_is_mentioned() -> None:
    for name in rewards.__all__:
        if name.endswith(("Reward", "Rewards", "_reward", "Limited", "Limits", "Error")):
            assert f"`{name}" in TEXT, name
