from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lightning_rlhf.rewards import Failure, MathVerifyReward, WeightedRewards, score

HUGE = "(13/10)^6472416997"
RIGHT = [
    ("The answer is \\boxed{x+1}.", "1+x"),
    ("so it is $\\frac{1}{2}$", "0.5"),
    ("so it is 0.5", "\\frac{1}{2}"),
    ("thus $x = 3$, that is 3", 3),
    ("$\\sqrt{8}$", "2\\sqrt{2}"),
    ("1,234", "1234"),
    ("\\boxed{(1, 2)}", "$(1,2)$"),
]
WRONG = [("$x+2$", "1+x"), ("0.3333", "\\frac{1}{3}"), ("", "1"), ("no idea", "1"), ("9" * 5000, "1")]


@pytest.fixture(scope="module")
def reward() -> Iterator[MathVerifyReward]:
    reward = MathVerifyReward(cpu_seconds=1, seconds=120.0)
    reward.start()
    yield reward
    reward.close()


def test_expressions_are_compared_by_value(reward: MathVerifyReward) -> None:
    responses, truths = zip(*RIGHT, *WRONG, strict=True)
    found = reward([""] * len(responses), list(responses), [{"answer": truth} for truth in truths])
    assert found == [1.0] * len(RIGHT) + [0.0] * len(WRONG)


def test_h04_huge_numbers_are_wrong_within_the_limit_and_raise_nothing(reward: MathVerifyReward) -> None:
    begun = time.monotonic()
    responses = [HUGE, f"${HUGE.replace('6472416997', '{6472416997}')}$", "$9^{9^{9^9}}$", "2"]
    scores = score(reward, [""] * 4, responses, [{"answer": "2"}] * 4)
    assert time.monotonic() - begun < 100.0  # a second or two of processor time each; on a busy machine it takes longer
    assert scores.rewards.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert scores.num_failed == 0


def test_it_can_be_called_from_any_thread(reward: MathVerifyReward) -> None:
    """math-verify's own limits need the main thread: with them these rows would all be wrong, or raise."""
    found: list[torch.Tensor] = []

    def call() -> None:
        several = WeightedRewards([(reward, 1.0), (lambda p, r, m: [0.0] * len(r), 1.0)])
        found.append(score(several, [""] * 2, ["$\\frac12$", "3"], [{"answer": "0.5"}] * 2).rewards)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.tolist() for one in found] == [[1.0, 0.0]] * 3


def test_a_truth_that_is_no_mathematics_fails_its_row(reward: MathVerifyReward) -> None:
    found = reward([""] * 3, ["1", "1", "1"], [{"answer": "1"}, {"answer": ""}, {"solution": "1"}])
    assert found[0] == 1.0
    assert isinstance(found[1], Failure)
    assert "no mathematics in the truth ''" in found[1].reason
    assert isinstance(found[2], Failure)
    assert "metadata['answer'] is missing; it has ['solution']" in found[2].reason
