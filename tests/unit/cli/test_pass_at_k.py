from __future__ import annotations

import itertools
import math
import random

import pytest

from lightning_rlhf.cli.pass_at_k import PromptResult, by_task, pass_at_k, summarize


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_it_is_the_share_of_subsets_that_hold_a_correct_sample(samples: int) -> None:
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        right = [index < correct for index in range(samples)]
        subsets = list(itertools.combinations(right, k))
        assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_it_is_unbiased_and_the_plug_in_is_not() -> None:
    draw, chance, samples, k = random.Random(0), 0.2, 8, 4
    counts = [sum(draw.random() < chance for _ in range(samples)) for _ in range(20_000)]
    truth = 1 - (1 - chance) ** k
    estimate = sum(pass_at_k(samples, count, k) for count in counts) / len(counts)
    plug_in = sum(1 - (1 - count / samples) ** k for count in counts) / len(counts)
    assert abs(estimate - truth) < 0.01
    assert abs(plug_in - truth) > 0.03


def test_many_samples_lose_no_digits() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-12)
    for wrong in ((4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match="pass@k needs"):
            pass_at_k(*wrong)


def result(uid: str, task: str, *rewards: float) -> PromptResult:
    return PromptResult(uid=uid, task=task, rewards=rewards, lengths=(2,) * len(rewards), truncated=1)


def test_the_summary_by_hand() -> None:
    results = [result("a", "x", 1.0, 0.0), result("b", "y", 0.5, 0.5), result("c", "x", math.nan, 1.0)]
    found = summarize(results, ks=[1, 2], threshold=1.0)
    assert found["mean"] == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert found["mean_standard_error"] == pytest.approx(math.sqrt((2 * (1 / 6) ** 2 + (1 / 3) ** 2) / 2 / 3))
    assert found["pass@1"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert found["pass@2"] == pytest.approx((1.0 + 0.0) / 2)  # prompt c has one verdict alone
    assert (found["failed"], found["truncated_fraction"], found["response_length"]) == (1, 0.5, 2.0)
    assert summarize(results, ks=[1], threshold=0.5)["pass@1"] == pytest.approx((0.5 + 1.0 + 1.0) / 3)
    assert {task: [one.uid for one in part] for task, part in by_task(results).items()} == {"x": ["a", "c"], "y": ["b"]}
    nothing = summarize([result("a", "x", math.nan)], ks=[1], threshold=1.0)
    assert (nothing["mean"], nothing["pass@1"], nothing["failed"]) == (None, None, 1)
