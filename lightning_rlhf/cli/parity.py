"""The command ``lightning-rlhf parity``: does a layout compute what one process computes?"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from lightning_rlhf.parity.compare import QUANTITIES
from lightning_rlhf.parity.layout import parse_layout, parse_options
from lightning_rlhf.parity.measure import DEFAULT_EPS, EPS, LEARNING_RATE, NUM_STEPS
from lightning_rlhf.parity.processes import RankError
from lightning_rlhf.parity.run import MICRO_BATCH_TOKENS, TOLERANCE, ParityReport, run_parity
from lightning_rlhf.parity.tiny_models import TINY_MODELS

DIVERGED, REFUSED = 1, 2
"""Exit statuses: numbers differ by more than the tolerance; or there are none to compare."""

_MEANINGS = {
    "log_probs": "per-token log-probs, nats",
    "loss": f"loss, norm and metrics of {NUM_STEPS} steps",
    "grads": "gradients, and their clipped norm",
    "params": f"parameters after {NUM_STEPS} AdamW steps, lr {LEARNING_RATE:g}, eps {EPS:g}",
    "export": "weights as exported to a rollout engine",
}


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison and prints it.

    Returns:
        The exit status: 0 within the tolerance, 1 beyond it, 2 if it could not be run.
    """
    given = _parse(arguments)
    # a whole model's tensors lie in a temporary folder, which an exception removes and a plain SIGTERM would leave
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        report = run_parity(
            strategy=given.strategy,
            layout=parse_layout(given.layout),
            model=given.model,
            options=parse_options(given.option),
            micro_batch_tokens=given.micro_batch_tokens,
            tolerance=given.tolerance,
        )
    except (ValueError, RankError) as error:
        print(f"lightning-rlhf parity: {error}", file=sys.stderr)
        return REFUSED
    finally:
        signal.signal(signal.SIGTERM, before)
    if given.json:
        print(json.dumps(report.as_json()), flush=True)
    else:
        Console().print(report_table(report))
    if report.first_divergence is not None:
        print(f"lightning-rlhf parity: diverges first in {report.first_divergence}", file=sys.stderr)
        return DIVERGED
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf parity",
        description="Trains one fixed batch through a layout and through one process, and compares every number.",
    )
    parser.add_argument("--strategy", required=True, help="fsdp2_rl or another RL strategy")
    parser.add_argument("--layout", required=True, metavar="AXIS=SIZE,...", help="such as tp=2,pp=2")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further argument of the strategy, such as distributed_optimizer=true; may be repeated",
    )
    parser.add_argument(
        "--model",
        default="tiny-qwen3",
        help=f"{', '.join(TINY_MODELS)}, or a model's directory or id (default: %(default)s)",
    )
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        default=MICRO_BATCH_TOKENS,
        metavar="N",
        help="most tokens in one of the layout's micro-batches (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, metavar="X", help="largest difference (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    return parser.parse_args(arguments)


def report_table(report: ParityReport) -> Table:
    """The differences as a table, one line for each quantity, and the ungated line of AdamW's default eps."""
    layout = ",".join(f"{axis}={size}" for axis, size in report.layout.items())
    table = Table(
        title=f"{report.strategy} {layout} against one process, fp32 on {report.device_type}",
        title_justify="left",
        title_style="bold",
        caption=f"tolerance {report.tolerance:g}, {report.seconds:.1f} s",
        caption_justify="left",
    )
    table.add_column("what")
    table.add_column("largest difference", justify="right", no_wrap=True)
    table.add_column("at")
    table.add_column("")
    for quantity in QUANTITIES:
        differences = getattr(report.comparison, quantity)
        good = all(difference <= report.tolerance for difference in differences.values())
        table.add_row(*_row(_MEANINGS[quantity], differences), "[green]equal[/]" if good else "[bold red]differs[/]")
    default = report.comparison.params_default_eps
    table.add_row(*_row(f"parameters with AdamW's default eps {DEFAULT_EPS:g}", default), "[dim]not gated[/]")
    return table


def _row(meaning: str, differences: Mapping[str, float]) -> tuple[str, str, str]:
    at, largest = max(differences.items(), key=lambda item: item[1], default=("nothing", math.inf))
    return meaning, f"{largest:.2e}", at
