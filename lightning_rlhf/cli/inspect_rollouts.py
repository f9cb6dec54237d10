"""The command ``lightning-rlhf inspect``: the rollouts of an RL step, in the terminal."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_rlhf.callbacks.samples import shortened
from lightning_rlhf.cli.run_records import RecordError, dumped_steps, read_rollouts, reward_of

REFUSED = 2
"""Exit status if there is nothing to show."""
_ROWS = 10
_HELP = "n: next step, p: previous, t: highest rewards, b: lowest, a: all rows, a number: that step, q: quit"


def main(arguments: Sequence[str]) -> int:
    """Prints a step's rollouts.

    Returns:
        The exit status: 2 if they are not there.
    """
    given = _parse(arguments)
    try:
        steps = dumped_steps(given.run)
        step = max(steps) if given.step is None else given.step
        if step not in steps:
            raise RecordError(f"{given.run} holds no rollouts of RL step {step}; it has {_spans(list(steps))}.")
        rows = chosen(read_rollouts(steps[step]), top=given.top, bottom=given.bottom, uid=given.uid)
        if given.json:
            for row in rows:
                print(json.dumps(row, ensure_ascii=False))
        elif given.browse:
            browse(Console(), steps, step, input, max_characters=given.max_characters)
        else:
            limit = None if given.all or given.top or given.bottom or given.uid else _ROWS
            show(Console(), steps[step], rows, step=step, limit=limit, max_characters=given.max_characters)
    except RecordError as error:
        print(f"lightning-rlhf inspect: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf inspect", description="Shows the rollouts that a run dumped: prompt, response, reward."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, such as outputs/NAME")
    parser.add_argument("--step", type=int, metavar="N", help="RL step, from 1 (default: the last that was dumped)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--top", type=_positive, metavar="K", help="the K rows with the highest rewards")
    which.add_argument("--bottom", type=_positive, metavar="K", help="the K rows with the lowest rewards")
    which.add_argument("--uid", help="the rows of one prompt")
    which.add_argument("--all", action="store_true", help=f"all rows, not the first {_ROWS}")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print the rows as JSON, one a line, with ids and log-probs")
    how.add_argument("--browse", action="store_true", help="go from step to step by keys")
    parser.add_argument(
        "--max-characters", type=_positive, default=400, metavar="N", help="of a text (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def chosen(
    rows: Sequence[dict[str, Any]], *, top: int | None = None, bottom: int | None = None, uid: str | None = None
) -> list[dict[str, Any]]:
    """Some of a step's rows. Rows whose reward failed have none to be ranked by, and come last either way.

    Raises:
        RecordError: if no row has that uid.
    """
    if uid is not None:
        found = [row for row in rows if row["uid"] == uid]
        if not found:
            known = list(dict.fromkeys(row["uid"] for row in rows))
            raise RecordError(f"No rollout has the uid {uid!r}; this step has {', '.join(known[:8])}.")
        return found
    if top is None and bottom is None:
        return list(rows)
    sign = 1.0 if top is None else -1.0

    def rank(row: dict[str, Any]) -> tuple[bool, float]:
        reward = reward_of(row)
        return math.isnan(reward), 0.0 if math.isnan(reward) else sign * reward

    return sorted(rows, key=rank)[: top if bottom is None else bottom]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line about rows: rewards, groups, lengths, how they ended."""
    rewards = [reward_of(row) for row in rows if not math.isnan(reward_of(row))]
    groups: dict[str, set[float]] = defaultdict(set)
    for row in rows:
        groups[row["uid"]].update(() if math.isnan(reward_of(row)) else (reward_of(row),))
    flat = sum(len(found) < 2 for found in groups.values())
    lengths = [len(row["response_token_ids"]) for row in rows]
    ends = ", ".join(
        f"{count} {reason}" for reason, count in Counter(row["finish_reason"] for row in rows).most_common()
    )
    if rewards:
        spread = f"mean {statistics.fmean(rewards):.4f}, {min(rewards):.4g} to {max(rewards):.4g}"
    else:
        spread = "none"
    failed = len(rows) - len(rewards)
    return (
        f"{len(rows)} rollouts of {len(groups)} prompts ({flat} without signal); reward {spread}"
        f"{f', {failed} failed' if failed else ''}; response {statistics.fmean(lengths):.1f} tokens, at most "
        f"{max(lengths)}; {ends}"
    )


def show(
    console: Console,
    path: Path,
    rows: Sequence[dict[str, Any]],
    *,
    step: int,
    limit: int | None,
    max_characters: int,
) -> None:
    """Prints the summary of the whole step and a table of ``rows``, at most ``limit`` of them."""
    whole = read_rollouts(path)
    console.print(f"RL step {step}: {summary(whole)}", markup=False, highlight=False)
    shown = list(rows) if limit is None else list(rows[:limit])
    console.print(_table(shown, max_characters=max_characters))
    if len(shown) < len(rows):
        console.print(f"{len(rows) - len(shown)} more; --all shows them", markup=False, highlight=False)


def _table(rows: Sequence[dict[str, Any]], *, max_characters: int) -> Table:
    table = Table(show_lines=True)
    for name, ratio in (("uid", None), ("prompt", 3), ("response", 3)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for name in ("reward", "advantage", "tokens", "end"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        # Text, not str: rich would read [bold] in a response as markup
        texts = [Text(shortened(row[name], max_characters)) for name in ("prompt", "response")]
        uid = Text(shortened(f"{row['uid']} / {row['sample_index']}", 40))
        parts = row.get("reward_components") or {}
        reward = "\n".join([_number(row["reward"]), *(f"{name} {_number(value)}" for name, value in parts.items())])
        length = str(len(row["response_token_ids"]))
        table.add_row(uid, *texts, Text(reward), _number(row["advantage"]), length, Text(str(row["finish_reason"])))
    return table


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def browse(
    console: Console, steps: dict[int, Path], step: int, read: Callable[[str], str], *, max_characters: int
) -> None:
    """Shows steps as the user asks for them, until ``q`` or the end of input.

    Args:
        console: where to print.
        steps: the files, by RL step.
        step: the first to show.
        read: gives the user's answer to a question.
        max_characters: of a text.
    """
    order, view, limit = list(steps), chosen, _ROWS
    views: dict[str, Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]] = {
        "t": lambda rows: view(rows, top=limit),
        "b": lambda rows: view(rows, bottom=limit),
        "a": view,
        "": lambda rows: view(rows)[:limit],
    }
    how = ""
    while True:
        rows = read_rollouts(steps[step])
        show(console, steps[step], views[how](rows), step=step, limit=None, max_characters=max_characters)
        how = ""
        console.print(_HELP, markup=False, highlight=False)
        try:
            answer = read("> ").strip()
        except EOFError:
            return
        if answer == "q":
            return
        if answer in ("n", "p"):
            place = order.index(step) + (1 if answer == "n" else -1)
            step = order[min(max(place, 0), len(order) - 1)]
        elif answer.isdigit() and int(answer) in steps:
            step = int(answer)
        elif answer in ("t", "b", "a"):
            how = answer
        else:
            console.print(f"{answer!r}: not a key, and no step of {_spans(order)}", markup=False, highlight=False)


def _spans(numbers: Sequence[int]) -> str:
    """``1-3, 5`` of 1, 2, 3 and 5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
