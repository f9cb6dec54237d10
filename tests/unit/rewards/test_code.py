from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.rewards import CodeReward, Failure, SandboxLimits, score

SUM = [{"input": "1 2\n", "output": "3"}, {"input": "-5 5", "output": "0\n"}]
ASSERTS = ["assert add(1, 2) == 3", "assert add(-5, 5) == 0"]
LIMITS = SandboxLimits(cpu_seconds=2, seconds=30.0)


def fenced(code: str) -> str:
    return f"First I thought:\n```python\nraise ValueError\n```\nBut now:\n```python\n{code}\n```\nDone."


def reward(response: str, tests: Any, **arguments: Any) -> float | Failure:
    return CodeReward(limits=LIMITS, **arguments)([""], [response], [{"tests": tests}])[0]


@pytest.mark.parametrize(
    ("code", "tests", "expected", "share"),
    [
        ("a, b = map(int, input().split())\nprint(a + b, ' ')", SUM, 1.0, 1.0),
        ("print(3)", SUM, 0.0, 0.5),
        ("a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)", SUM, 0.0, 0.0),
        ("def add(a, b): return a + b", ASSERTS, 1.0, 1.0),
        ("def add(a, b): return 3", ASSERTS, 0.0, 0.5),
        ("def add(a, b): return a +", ASSERTS, 0.0, 0.0),
        ("import sys\nsys.exit(0)", ASSERTS, 0.0, 0.0),
        ("import os\nprint('ok')\nos._exit(0)", ASSERTS, 0.0, 0.0),
        ("def add(a, b):\n    print('noise')\n    return a + b", ASSERTS, 1.0, 1.0),
        ("while True: pass", ASSERTS[:1], 0.0, 0.0),
    ],
)
def test_the_last_fenced_program_is_scored_by_its_tests(code: str, tests: Any, expected: float, share: float) -> None:
    assert reward(fenced(code), tests) == expected
    if share != expected:
        assert reward(fenced(code), tests, all_or_nothing=False) == share


def test_a_response_without_a_program_is_wrong() -> None:
    assert reward("def add(a, b): return a + b", ASSERTS) == 0.0
    assert reward("def add(a, b): return a + b", ASSERTS, fenced=False) == 1.0
    assert reward("```python\ndef add(a, b): return a + b", ASSERTS) == 1.0  # cut off at the length limit


def test_rows_are_scored_side_by_side_and_malformed_tests_fail_theirs() -> None:
    good = fenced("def add(a, b): return a + b")
    tests: list[Any] = [ASSERTS, [], None, [1], "assert True", ASSERTS]
    scores = score(CodeReward(limits=LIMITS), [""] * 6, [good] * 5 + ["no"], [{"tests": one} for one in tests])
    assert scores.rewards.isnan().tolist() == [False, True, True, True, True, False]
    assert scores.rewards[[0, 5]].tolist() == [1.0, 0.0]
    assert scores.failures == {"code": 4}
    assert "must be a list of tests, got []" in scores.errors[0]


def test_the_word_that_says_passed_is_another_each_time() -> None:
    """A program cannot print what another run's tests have printed."""
    seen = "import sys\nprint(sys.stdin.read())"  # it reads behind the word, which the runner has taken
    assert reward(fenced(seen), ["assert False"]) == 0.0


def test_workers_must_be_positive() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        CodeReward(workers=0)
