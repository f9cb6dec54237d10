from __future__ import annotations

import functools
import math
import threading
from typing import Any

import pytest
import torch

from lightning_rlhf.metrics import compute_metrics, merge_metrics
from lightning_rlhf.rewards import Failure, Scores, WeightedRewards, component_metrics, reward_name, score
from lightning_rlhf.rewards.function import MAX_ERRORS


def run(reward: Any, responses: list[str]) -> Scores:
    return score(reward, [f"p{r}" for r in responses], responses, [{"row": i} for i in range(len(responses))])


def length_reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    return [float(len(response)) for response in responses]


def exact(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    return [float(prompt == "p" + response) for prompt, response in zip(prompts, responses, strict=True)]


def raises_on_bad(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    if "bad" in responses:
        raise ZeroDivisionError("cannot divide 'bad'")
    return [1.0] * len(responses)


def test_a_reward_sees_prompts_responses_and_metadata_of_the_same_rows() -> None:
    def reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        assert prompts == ["pa", "pb"]
        assert responses == ["a", "b"]
        return [facts["row"] + 0.5 for facts in metadata]

    scores = run(reward, ["a", "b"])
    assert scores.rewards.tolist() == [0.5, 1.5]
    assert scores.rewards.dtype == torch.float32
    assert (scores.num_failed, scores.errors) == (0, [])
    assert scores.components["reward"].tolist() == [0.5, 1.5]


@pytest.mark.parametrize("as_type", [list, tuple, torch.tensor])
def test_values_may_come_in_any_sequence(as_type: Any) -> None:
    assert run(lambda p, r, m: as_type([1, 0]), ["a", "b"]).rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "gave None"),
        (math.nan, "gave nan"),
        (math.inf, "gave inf"),
        (-math.inf, "gave -inf"),
        (1e300, "not a finite fp32 number"),
        pytest.param(10**5000, "int too large", id="5001 digits"),
        ("1.0", "gave a string, '1.0'"),
        ([1.0], "gave a list"),
    ],
)
def test_h01_a_value_that_is_no_finite_number_fails_its_row_and_is_never_zero(value: Any, reason: str) -> None:
    def judge(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[Any]:
        return [1.0, value, 0.0]

    scores = run(judge, ["a", "b", "c"])
    assert scores.rewards.isnan().tolist() == [False, True, False]
    assert scores.rewards[[0, 2]].tolist() == [1.0, 0.0]
    assert scores.num_failed == 1
    assert len(scores.errors) == 1
    assert scores.errors[0].startswith("row 1, judge: ")
    assert reason in scores.errors[0]


def test_an_exception_fails_the_rows_that_raise_and_no_others() -> None:
    calls: list[int] = []

    def counted(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        calls.append(len(responses))
        return raises_on_bad(prompts, responses, metadata)

    scores = run(counted, ["good", "bad", "fine"])
    assert scores.rewards.isnan().tolist() == [False, True, False]
    assert scores.rewards[[0, 2]].tolist() == [1.0, 1.0]
    assert scores.errors == ["row 1, counted: ZeroDivisionError: cannot divide 'bad'"]
    assert calls == [3, 1, 1, 1]


def test_every_failure_is_counted_and_the_first_ones_described() -> None:
    scores = run(raises_on_bad, ["bad"] * 9)
    assert scores.rewards.isnan().all()
    assert scores.num_failed == 9
    assert [error.split(",")[0] for error in scores.errors] == [f"row {row}" for row in range(MAX_ERRORS)]


def test_an_interrupt_is_not_a_failed_row() -> None:
    def interrupted(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted, ["a"])


def test_a_wrong_number_of_values_is_an_error_with_both_numbers() -> None:
    def short(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match="Reward short gave 1 values for 3 responses"):
        run(short, ["a", "b", "c"])


def test_a_wrong_number_of_values_on_the_second_try_is_an_error_too() -> None:
    def fickle(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        if len(responses) > 1:
            raise RuntimeError("batches are not supported")
        return [1.0, 2.0]

    with pytest.raises(ValueError, match="Reward fickle gave 2 values for 1 responses"):
        run(fickle, ["a", "b"])


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'prompts': 2, 'responses': 1, 'metadata': 1"):
        score(exact, ["a", "b"], ["a"], [{}])


def test_no_rows_give_no_rewards() -> None:
    scores = run(length_reward, [])
    assert scores.rewards.shape == (0,)
    assert scores.num_failed == 0


# --- several with weights ---------------------------------------------------------------------------------------


def test_weighted_sum_with_components_by_name() -> None:
    scores = run(WeightedRewards([(length_reward, 0.5), (exact, -2.0)]), ["a", "bbb"])
    assert scores.rewards.tolist() == [0.5 - 2.0, 1.5 - 2.0]
    assert list(scores.components) == ["length_reward", "exact"]
    assert scores.components["length_reward"].tolist() == [1.0, 3.0]
    assert scores.components["exact"].tolist() == [1.0, 1.0]


def test_a_failing_component_fails_the_row_and_keeps_the_others_known() -> None:
    scores = run(WeightedRewards([(length_reward, 1.0), (raises_on_bad, 1.0)]), ["bad", "ok"])
    assert scores.rewards.isnan().tolist() == [True, False]
    assert scores.rewards[1].item() == 3.0
    assert scores.num_failed == 1
    assert scores.components["length_reward"].tolist() == [3.0, 2.0]
    assert scores.errors == ["row 0, raises_on_bad: ZeroDivisionError: cannot divide 'bad'"]


def test_a_component_of_weight_zero_is_reported_alone() -> None:
    scores = run(WeightedRewards([(length_reward, 1.0), (raises_on_bad, 0.0)]), ["bad", "ok"])
    assert scores.rewards.tolist() == [3.0, 2.0]
    assert scores.num_failed == 0
    assert scores.components["raises_on_bad"].isnan().tolist() == [True, False]


def test_weighted_rewards_are_a_reward_themselves() -> None:
    inner = WeightedRewards([(length_reward, 2.0)])
    assert inner(["pa"], ["a"], [{}]) == [2.0]
    assert run(WeightedRewards([(inner, 0.5), (exact, 1.0)]), ["a"]).rewards.tolist() == [2.0]


def test_names_are_unique_and_lists_do_for_pairs() -> None:
    twice = functools.partial(length_reward)
    rewards = WeightedRewards([[length_reward, 1], [twice, 1], [twice, 1]])  # type: ignore[list-item]
    assert rewards.names == ["length_reward", "length_reward_2", "length_reward_3"]


def test_names_of_callables() -> None:
    class Judge:
        def __call__(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
            return [0.0] * len(responses)

    assert reward_name(Judge()) == "Judge"
    assert reward_name(functools.partial(exact)) == "exact"
    assert reward_name(exact) == "exact"


@pytest.mark.parametrize(("rewards", "message"), [([], "at least one"), ([(exact, math.nan)], "exact must be finite")])
def test_weighted_rewards_refuse(rewards: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightedRewards(rewards)


def test_the_components_stand_in_a_matrix_with_weights_and_failures_by_name() -> None:
    scores = run(WeightedRewards([(length_reward, 0.5), (raises_on_bad, -2.0), (exact, 0.0)]), ["bad", "ok"])
    assert scores.component_names == ["length_reward", "raises_on_bad", "exact"]
    assert scores.component_matrix.shape == (2, 3)
    assert scores.component_matrix.dtype == torch.float32
    assert scores.component_matrix[1].tolist() == [2.0, 1.0, 1.0]
    assert scores.component_matrix[0].isnan().tolist() == [False, True, False]
    assert scores.weights == {"length_reward": 0.5, "raises_on_bad": -2.0, "exact": 0.0}
    assert scores.failures == {"length_reward": 0, "raises_on_bad": 1, "exact": 0}
    single = run(length_reward, ["a", "bb"])
    assert single.component_matrix.tolist() == [[1.0], [2.0]]


def test_a_failure_says_its_own_reason() -> None:
    scores = run(lambda p, r, m: [1.0, Failure("the judge was out"), 0.0], ["a", "b", "c"])
    assert scores.rewards.isnan().tolist() == [False, True, False]
    assert scores.errors == ["row 1, <lambda>: the judge was out"]


def test_component_metrics_are_means_over_rows_that_have_one_and_name_what_failed() -> None:
    """H01: the failed row is in no mean; two ranks' parts join to what one process gives."""
    nan = math.nan
    whole = component_metrics({"a": torch.tensor([1.0, nan, 0.0, 1.0]), "b": torch.tensor([nan] * 4)})
    assert compute_metrics(whole) == {"reward/a": pytest.approx(2 / 3), "reward/a/failed": 1.0, "reward/b/failed": 4.0}
    parts = [
        component_metrics({"a": torch.tensor(own), "b": torch.tensor([nan] * len(own))})
        for own in ([1.0, nan, 0.0], [1.0])
    ]
    assert compute_metrics(merge_metrics(parts)) == compute_metrics(whole)


def test_weighted_rewards_run_side_by_side() -> None:
    barrier = threading.Barrier(2, timeout=20)

    def one(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        barrier.wait()  # broken, and the row failed, if the other is not called meanwhile
        prompts.clear()  # its own list
        return [1.0]

    def other(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        barrier.wait()
        return [2.0]

    scores = run(WeightedRewards([(one, 1.0), (other, 1.0)]), ["a"])
    assert scores.rewards.tolist() == [3.0]
    assert list(scores.components) == ["one", "other"]
