from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.rewards import gsm8k_reward, score


def reward(response: str, answer: Any) -> float:
    return gsm8k_reward(["p"], [response], [{"answer": answer}])[0]


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("2+40=42\n#### 42\n" + "x" * 420, "42", 1.0),
        ("#### 7 no, wait: #### 1,234", "1234", 1.0),
        ("#### 1234 no, wait: #### 7", "1234", 0.0),
        ("the answer is 42", "42", 0.0),
        ("", "42", 0.0),
        ("####", "42", 0.0),
    ],
)
def test_h03_text_after_the_answer_and_the_last_marker(response: str, answer: str, expected: float) -> None:
    assert reward(response, answer) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("#### 42", 42, 1.0),
        ("#### 42", "Tom has 6*7=<<6*7=42>>42.\n#### 42", 1.0),
        ("#### 42.0", "42", 1.0),
        ("#### 042", "42", 1.0),
        ("#### $42 dollars", "42", 1.0),
        ("####42.", "42", 1.0),
        ("#### -42", "42", 0.0),
        ("#### -42", -42, 1.0),
        ("#### 4200", "42", 0.0),
        ("#### 42", "42.5", 0.0),
        ("#### .5", 0.5, 1.0),
        ("#### forty-two", "42", 0.0),
        ("#### $-42", "-42", 1.0),
        ("#### 42% of them", "42", 1.0),
        ("#### 1,234.50", "1234.5", 1.0),
        ("#### 42/5", "42", 0.0),
        ("#### 42^2", "42", 0.0),
        ("#### 42**2", "42", 0.0),
        ("#### 42e3", "42", 0.0),
        ("#### 12:30", "12", 0.0),
        ("#### 4.2.1", "4.2", 0.0),
        ("#### 42, or rather #### 42/5", "42", 0.0),
    ],
)
def test_numbers_are_compared_exactly(response: str, answer: Any, expected: float) -> None:
    assert reward(response, answer) == expected


def test_a_number_of_thousands_of_digits_is_wrong_or_right_and_never_an_error() -> None:
    huge = "9" * 5000
    assert reward(f"#### {huge}", "1") == 0.0
    assert reward(f"#### {huge}", huge) == 1.0
    assert reward(f"#### {huge[:-1]}8", huge) == 0.0
    assert reward("#### (13/10)^6472416997", "2") == 0.0


def test_a_truth_without_a_number_fails_the_row() -> None:
    scores = score(gsm8k_reward, ["p"] * 3, ["#### 1"] * 3, [{"answer": "1"}, {"answer": "one"}, {}])
    assert scores.rewards.isnan().tolist() == [False, True, True]
    assert "must be a number or end in '#### number', got 'one'" in scores.errors[0]
    assert "KeyError: 'answer'" in scores.errors[1]
