"""What samples of a prompt set say: pass@k without bias, means, one line a task."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    r"""The chance that one of ``k`` samples is correct, estimated from ``n`` samples with ``c`` correct ones.

    :math:`1 - \binom{n-c}{k} / \binom{n}{k}` (Chen et al., arXiv:2107.03374, equation 1): the share of all subsets of
    size ``k`` that hold a correct sample, whose expectation is the chance itself. The plug-in
    :math:`1 - (1 - c/n)^k` is biased downwards.

    Raises:
        ValueError: unless ``0 <= num_correct <= num_samples`` and ``1 <= k <= num_samples``.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@k needs 0 <= correct <= samples and 1 <= k <= samples, got {num_correct=} {num_samples=} {k=}."
        )
    # in whole numbers: no product of many factors loses digits
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """The samples of one prompt.

    Attributes:
        uid: of the prompt.
        task: that it belongs to.
        rewards: of its samples; NaN where the reward failed.
        lengths: of its samples, in tokens.
        truncated: how many hit the length limit.
    """

    uid: str
    task: str
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: int


def summarize(results: Sequence[PromptResult], *, ks: Sequence[int], threshold: float) -> dict[str, Any]:
    """Numbers over prompts, each prompt counting alike.

    A sample whose reward failed has no verdict and is left out; a prompt with fewer than ``k`` verdicts has no pass@k.

    Args:
        results: one a prompt; at least one.
        ks: for pass@k.
        threshold: a sample is correct if its reward is at least this.

    Returns:
        ``num_prompts``; ``mean`` of the prompts' mean rewards with ``mean_standard_error`` over prompts;
        ``pass@<k>`` for each k; ``failed`` samples; ``truncated_fraction`` and ``response_length`` of samples.
        None where nothing is known.
    """
    means, passes = [], {k: list[float]() for k in ks}
    for result in results:
        known = [reward for reward in result.rewards if not math.isnan(reward)]
        if known:
            means.append(math.fsum(known) / len(known))
        correct = sum(reward >= threshold for reward in known)
        for k in ks:
            if k <= len(known):
                passes[k].append(pass_at_k(len(known), correct, k))
    samples = sum(len(result.rewards) for result in results)
    return {
        "num_prompts": len(results),
        "mean": _mean(means),
        "mean_standard_error": _standard_error(means),
        **{f"pass@{k}": _mean(found) for k, found in passes.items()},
        "failed": sum(math.isnan(reward) for result in results for reward in result.rewards),
        "truncated_fraction": sum(result.truncated for result in results) / samples,
        "response_length": sum(length for result in results for length in result.lengths) / samples,
    }


def by_task(results: Sequence[PromptResult]) -> dict[str, list[PromptResult]]:
    """The results of each task, in the order of first appearance."""
    tasks: dict[str, list[PromptResult]] = defaultdict(list)
    for result in results:
        tasks[result.task].append(result)
    return dict(tasks)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _standard_error(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
