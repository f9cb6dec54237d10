"""Draws ``images/batches.svg``: ``python docs/draw_batches.py > docs/images/batches.svg``.

Cut by the product's own planner: one RL step of 16 rollouts, two mini-batches, two ranks, micro-batches by count and by
tokens.
"""

from __future__ import annotations

import sys

import numpy as np

from lightning_rlhf.batching.balance import balanced_partitions, sequence_costs
from lightning_rlhf.batching.micro_batch import plan_micro_batches

LENGTHS = [9, 30, 12, 26, 7, 41, 15, 22, 11, 34, 8, 18, 27, 10, 45, 13]
MINI_BATCH, RANKS = 8, 2
STATIC, DYNAMIC = 2, 56
SCALE, ROW, GAP = 4.2, 16, 4
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")


class Picture:
    """Lines of SVG, from the top down."""

    def __init__(self, width: int) -> None:
        self.width, self.y, self.lines = width, 8, list[str]()

    def text(self, text: str, *, x: int = 8, bold: bool = False) -> None:
        """One line, below what is there."""
        weight = ' font-weight="bold"' if bold else ""
        self.y += 18
        self.lines.append(f'<text x="{x}" y="{self.y}"{weight}>{text}</text>')
        self.y += 6

    def bars(
        self, lengths: list[int], colors: list[str], *, x: int, label: str = "", outline: int | None = None
    ) -> None:
        """Sequences end to end; ``outline`` is the room that padding would fill."""
        place = float(x)
        if label:
            self.lines.append(f'<text x="{x - 6}" y="{self.y + 12}" text-anchor="end">{label}</text>')
        if outline is not None:
            self.lines.append(
                f'<rect x="{x}" y="{self.y - 1}" width="{outline * SCALE:.1f}" height="{ROW + 2}" fill="none" '
                f'stroke="#888" stroke-dasharray="3 3"/>'
            )
        for length, color in zip(lengths, colors, strict=True):
            width = length * SCALE
            self.lines.append(
                f'<rect x="{place:.1f}" y="{self.y}" width="{width - 1:.1f}" height="{ROW}" fill="{color}"/>'
                f'<text x="{place + width / 2:.1f}" y="{self.y + 12}" text-anchor="middle" fill="#fff">{length}</text>'
            )
            place += width
        self.y += ROW + GAP

    def svg(self) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.y + 8}" font-family="sans-serif" '
            f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        )
        return "\n".join([head, *self.lines, "</svg>"]) + "\n"


def shares() -> list[list[list[int]]]:
    """Lengths by mini-batch and rank, as the plan of a step cuts them."""
    order = np.arange(len(LENGTHS))
    np.random.default_rng(0).shuffle(order)
    found = []
    for start in range(0, len(LENGTHS), MINI_BATCH):
        chosen = [LENGTHS[row] for row in order[start : start + MINI_BATCH]]
        parts = balanced_partitions(sequence_costs(chosen), RANKS)
        found.append([[chosen[place] for place in part] for part in parts])
    return found


def draw() -> str:
    """The picture."""
    picture, x = Picture(900), 150
    picture.text(
        "Global batch: 16 rollouts of one RL step; each bar a sequence of prompt and response, in tokens", bold=True
    )
    picture.bars(LENGTHS[:8], ["#777"] * 8, x=x)
    picture.bars(LENGTHS[8:], ["#777"] * 8, x=x)
    mini_batches = shares()
    picture.text(
        "Two mini-batches of 8, drawn by the seed: an optimizer step each. Each is shared out over two ranks.",
        bold=True,
    )
    for number, ranks in enumerate(mini_batches):
        for rank, share in enumerate(ranks):
            picture.bars(
                share, [COLORS[2 * number + rank]] * len(share), x=x, label=f"mini-batch {number + 1}, rank {rank}"
            )
    for title, limits in (
        (f"Static micro-batches of mini-batch 1: micro_batch_size={STATIC}", {"micro_batch_size": STATIC}),
        (
            f"Dynamic micro-batches of mini-batch 1: max_tokens_per_micro_batch={DYNAMIC} (dashed)",
            {"max_tokens": DYNAMIC},
        ),
    ):
        picture.text(title, bold=True)
        plans = [plan_micro_batches(share, **limits) for share in mini_batches[0]]
        number = max(map(len, plans))
        for rank, share in enumerate(mini_batches[0]):
            for index, rows in enumerate(plan_micro_batches(share, num_micro_batches=number, **limits)):
                lengths = [share[row] for row in rows]
                picture.bars(
                    lengths, [COLORS[rank]] * len(lengths), x=x, label=f"rank {rank}, micro-batch {index + 1}",
                    outline=limits.get("max_tokens"),
                )  # fmt: skip
    return picture.svg()


if __name__ == "__main__":
    sys.stdout.write(draw())
