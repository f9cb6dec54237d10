"""What reinforcement learning adds to the data: prompts with their answers, and what a response is worth."""

from __future__ import annotations

from typing import Any

from data import SUMS

from lightning_rlhf.data import ListPrompts, Prompt


def sums() -> ListPrompts:
    """The prompts of fine-tuning; the answers go to the reward as metadata."""
    return ListPrompts([Prompt(uid=prompt, prompt=prompt, metadata={"answer": answer}) for prompt, answer in SUMS])


def right_sum(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:  # noqa: ARG001
    """1 for the answer alone, else half the share of digits in the response."""
    return [
        1.0 if response == row["answer"] else 0.5 * sum(c.isdigit() for c in response) / max(len(response), 1)
        for response, row in zip(responses, metadata, strict=True)
    ]
