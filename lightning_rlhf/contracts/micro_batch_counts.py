"""How an engine has cut a mini-batch, apart from what it has learnt from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_rlhf.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class MicroBatchCounts:
    """What one rank's model-parallel group ran for its share of a mini-batch.

    It depends on the layout, which nothing that is learnt may: so it is no metric of ``train_batch``.

    Attributes:
        num_micro_batches: forwards (and backwards) of every data-parallel rank; those without rows count.
        num_tokens: that went through the model, padding among them; a beginning that rows share counts once.
        num_padding: of these, tokens of no row: up to a multiple that the layout needs, or in place of rows where a
            micro-batch has none.
    """

    num_micro_batches: int
    num_tokens: int
    num_padding: int

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """To be joined over optimizer steps and data-parallel ranks: padding over tokens, and the mean number."""
        padding, tokens, number = torch.tensor(
            [self.num_padding, self.num_tokens, self.num_micro_batches], dtype=torch.float64, device=device
        )
        return {
            "padding_fraction": Metric(value=padding, weight=tokens, reduction="mean"),
            "num_micro_batches": Metric.of(number),
        }
