"""The command ``lightning-rlhf plan``: what a run would do and take, before any model is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.errors import HydraException
from rich.console import Console
from rich.table import Table

from lightning_rlhf.cli.overrides import explain
from lightning_rlhf.cli.plan_run import plan_run
from lightning_rlhf.cli.show_config import compose_run
from lightning_rlhf.cli.targets import ConfigError

BAD_CONFIG = 2
"""Exit status when the configuration cannot be run, as of ``train``."""
_BYTES = ("memory_per_rank", "communication_per_rl_step")


def main(arguments: Sequence[str]) -> int:
    """Prints the plan; ``--json`` among the arguments prints it as one JSON object, in bytes.

    Returns:
        The exit status: 2 if the configuration cannot be run, with the reasons on stderr.
    """
    given = _parse(arguments)
    try:
        plan = plan_run(compose_run(given.overrides))
    except (HydraException, ConfigError) as error:
        reason = str(error) if isinstance(error, ConfigError) else explain(error)
        for line in reason.splitlines():
            print(f"lightning-rlhf plan: {line}", file=sys.stderr)
        return BAD_CONFIG
    if given.json:
        print(json.dumps(plan), flush=True)
    else:
        Console().print(plan_table(plan))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf plan",
        description="Prints a run's batches, memory, traffic and pipeline bubble; loads no model and starts nothing.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of train, such as experiment=NAME")
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    return parser.parse_intermixed_args(arguments)


def plan_table(plan: Mapping[str, Any]) -> Table:
    """One line for each number, under headings; what is not known is said to be so."""
    table = Table(title=str(plan["name"]), title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, content in plan.items():
        if heading == "name":
            continue
        title = heading.replace("_", " ")
        if isinstance(content, Mapping):
            table.add_row(f"[bold]{title}[/]", "")
            for key, value in content.items():
                table.add_row(f"  {key.replace('_', ' ')}", _show(value, in_bytes=heading in _BYTES))
        elif isinstance(content, list):
            for line in content:
                table.add_row(f"[yellow]{title}[/]", str(line))
        else:
            table.add_row(f"[bold]{title}[/]", _show(content, in_bytes=heading in _BYTES))
    return table


def _show(value: Any, *, in_bytes: bool) -> str:
    if value is None:
        return "not known (see notes)"
    if in_bytes and isinstance(value, int):
        return human_bytes(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={size}" for key, size in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def human_bytes(size: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
