"""A few samples now and then: numbers tell that a reward rises, samples tell why."""

from __future__ import annotations

import math
import unicodedata

import lightning.pytorch as pl
import rich
from lightning.pytorch.loggers import WandbLogger
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.types import PromptBatch, Rollouts

COLUMNS = ["prompt", "answer", "reward"]


class SampleTable(pl.Callback):
    """Prints a small table of prompts, answers and rewards on rank 0, and sends it to Weights & Biases in full.

    The table shows the first answer of each of rank 0's first prompts; with fewer prompts than rows, further answers.

    Args:
        every_n_steps: RL steps between two tables; the first step has one too.
        num_samples: rows.
        max_characters: longer texts are cut in the middle on the terminal; a prompt's end and an answer's end count.
        console: where to print; None is rich's own.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 5,
        num_samples: int = 3,
        max_characters: int = 240,
        console: Console | None = None,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("num_samples", num_samples)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if max_characters < 8:
            raise ValueError(f"max_characters must be at least 8, got {max_characters}.")
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.max_characters = max_characters
        self.console = rich.get_console() if console is None else console

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: PromptBatch, batch_idx: int
    ) -> None:
        module = as_on_policy(pl_module, callback=self)
        due = module.rl_step == 1 or module.rl_step % self.every_n_steps == 0
        if not due or not trainer.is_global_zero or batch.rollouts is None:
            return
        rollouts = batch.rollouts
        rows = [
            (rollouts.prompts[row], rollouts.responses[row], _reward(rollouts, row))
            for row in chosen_rows(rollouts, self.num_samples)
        ]
        self.console.print(self._table(rows, rl_step=module.rl_step))
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                # with the step, so that it stands beside the metrics of its RL step, also after a resume
                logger.log_table("samples", columns=COLUMNS, data=[list(row) for row in rows], step=module.rl_step)

    def _table(self, rows: list[tuple[str, str, float | None]], *, rl_step: int) -> Table:
        table = Table(title=f"Samples of RL step {rl_step}", title_justify="left", show_lines=True)
        table.add_column("prompt", ratio=3, overflow="fold")
        table.add_column("answer", ratio=3, overflow="fold")
        table.add_column("reward", justify="right", no_wrap=True)
        for prompt, answer, reward in rows:
            # Text, not str: rich would read [bold] in an answer as markup
            texts = [Text(shortened(text, self.max_characters)) for text in (prompt, answer)]
            table.add_row(*texts, Text("none" if reward is None else f"{reward:.3f}"))
        return table


def chosen_rows(rollouts: Rollouts, count: int) -> list[int]:
    """Indices of up to ``count`` rows, one of each prompt first, in the rows' order."""
    seen: set[str] = set()
    first, further = list[int](), list[int]()
    for row, uid in enumerate(rollouts.uids):
        (further if uid in seen else first).append(row)
        seen.add(uid)
    return sorted([*first, *further][:count])


def shortened(text: str, max_characters: int) -> str:
    """One printable paragraph of at most ``max_characters``: white space joined, control characters shown as ``?``.

    A terminal obeys escape sequences, so what a model writes must not reach it raw.
    """
    joined = " ".join(text.split())
    clean = "".join("?" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char for char in joined)
    if len(clean) <= max_characters:
        return clean
    gap = " ... "
    head = (max_characters - len(gap)) // 2
    tail = max_characters - len(gap) - head
    return f"{clean[:head]}{gap}{clean[-tail:]}"


def _reward(rollouts: Rollouts, row: int) -> float | None:
    """The row's reward; None if there is none yet, or it failed."""
    if rollouts.rewards is None:
        return None
    reward = float(rollouts.rewards[row])
    return None if math.isnan(reward) else reward
