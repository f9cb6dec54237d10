from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import reasoning_gym

from lightning_rlhf.rewards import ReasoningGymReward, reward_name, score


@pytest.fixture(scope="module")
def entry() -> dict[str, Any]:
    dataset = reasoning_gym.create_dataset(
        "chain_sum", size=20, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    return next(found for found in dataset if found["answer"] == "9")


def run(reward: ReasoningGymReward, entry: dict[str, Any], *responses: str) -> list[float]:
    return reward(["p"] * len(responses), list(responses), [{"entry": entry}] * len(responses))


def test_the_verifier_grades_the_whole_response(entry: dict[str, Any]) -> None:
    reward = ReasoningGymReward("chain_sum")
    # right, right as a decimal, the right digit as half of the response, wrong, empty
    assert run(reward, entry, " 9\n", "+09.0", "91", "8", "") == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_an_extracted_integer_is_graded_and_none_at_all_is_wrong(entry: dict[str, Any]) -> None:
    first = ReasoningGymReward("chain_sum", extract="first_integer")
    assert run(first, entry, "It is 9, not 4.", "4, or 9", "It is nine.", "9" * 5000) == [1.0, 0.0, 0.0, 1 / 5000]
    assert run(ReasoningGymReward("chain_sum", extract="last_integer"), entry, "4 + 5 = 9") == [1.0]


def test_binary_knows_right_and_wrong_alone(entry: dict[str, Any]) -> None:
    reward = ReasoningGymReward("chain_sum", extract="first_integer", binary=True)
    assert run(reward, entry, "9", "91", "8") == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda reward: pickle.loads(pickle.dumps(reward))])
def test_a_copy_scores_alike(clone: Any, entry: dict[str, Any]) -> None:
    reward = clone(ReasoningGymReward("chain_sum", extract="first_integer", binary=True))
    assert (reward.task, reward.extract, reward.binary) == ("chain_sum", "first_integer", True)
    assert run(reward, entry, "9", "91") == [1.0, 0.0]


def test_task_config_reaches_the_task() -> None:
    with pytest.raises(TypeError, match="no_such_setting"):
        ReasoningGymReward("chain_sum", task_config={"no_such_setting": 1})


def test_is_reported_under_its_task() -> None:
    assert reward_name(ReasoningGymReward("chain_sum")) == "chain_sum"


def test_a_row_without_an_entry_fails_and_says_what_is_missing(entry: dict[str, Any]) -> None:
    scores = score(ReasoningGymReward("chain_sum"), ["p", "p"], ["9", "9"], [{"answer": "9"}, {"entry": entry}])
    assert scores.rewards.isnan().tolist() == [True, False]
    assert "metadata['entry'] is missing (it has ['answer'])" in scores.errors[0]


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="no task 'chain_sums'; did you mean 'chain_sum'"):
        ReasoningGymReward("chain_sums")


def test_an_unknown_extraction_fails_at_construction() -> None:
    with pytest.raises(ValueError, match="Unknown extraction 'middle'"):
        ReasoningGymReward("chain_sum", extract="middle")  # type: ignore[arg-type]
