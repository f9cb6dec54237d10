"""Plain functions that hang: their rows fail, the batch returns."""

from __future__ import annotations

import functools
import math
import signal
import threading
import time
from typing import Any

import pytest

from lightning_rlhf.rewards import LimitedFunction, WeightedRewards, score
from lightning_rlhf.rewards import deadline as deadlines
from lightning_rlhf.rewards.deadline import FunctionLimits, OverDeadlineError, call_within, limits_of
from lightning_rlhf.rewards.scores import RewardBrokenError

short = functools.partial(LimitedFunction, batch_seconds=0.4, row_seconds=0.2)
RESPONSES = [str(number) for number in range(8)]


@pytest.fixture(autouse=True)
def no_thread_abandoned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "_abandoned", [])


def hangs_on_three(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """As H04: number 3 sleeps, number 5 raises, the rest score their parity."""
    found = []
    for response in responses:
        try:
            if response == "3":
                time.sleep(30)
        except Exception:  # noqa: BLE001 - what a careless reward does
            found.append(0.5)
            continue
        if response == "5":
            raise ValueError("five")
        found.append(float(int(response) % 2))
    return found


def _score(reward: Any) -> tuple[list[float | None], list[str]]:
    begun = time.monotonic()
    with pytest.warns(UserWarning, match=r"called with 8 rows, is over its limit of 0.4 s"):
        scores = score(reward, [""] * 8, RESPONSES, [{}] * 8)
    assert time.monotonic() - begun < 15.0
    return [None if math.isnan(value) else value for value in scores.rewards.tolist()], scores.errors


def test_h04_a_hanging_function_fails_its_row_alone() -> None:
    before = signal.getitimer(signal.ITIMER_REAL)[0], signal.getsignal(signal.SIGALRM)  # the test runner's own limit
    rewards, errors = _score(short(hangs_on_three))
    assert rewards == [0.0, 1.0, 0.0, None, 0.0, None, 0.0, 1.0]
    assert errors == ["row 3, hangs_on_three: over its limit of 0.2 s", "row 5, hangs_on_three: ValueError: five"]
    assert before[0] - 20 < signal.getitimer(signal.ITIMER_REAL)[0] <= before[0]
    assert signal.getsignal(signal.SIGALRM) == before[1]


def test_h04_so_it_does_among_several_rewards() -> None:
    rewards, errors = _score(WeightedRewards([(short(hangs_on_three), 1.0), (lambda p, r, m: [0.0] * len(r), 1.0)]))
    assert rewards == [0.0, 1.0, 0.0, None, 0.0, None, 0.0, 1.0]
    assert "its thread is abandoned" in errors[0]


def test_only_plain_functions_are_limited() -> None:
    class Judge:
        def __call__(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
            return [0.0] * len(responses)

        def method(self) -> None: ...

    assert limits_of(Judge()) is None
    assert limits_of(functools.partial(Judge())) is None
    for function in (hangs_on_three, lambda: 0, Judge().method, functools.partial(hangs_on_three)):
        assert limits_of(function) == FunctionLimits(batch_seconds=300.0, row_seconds=30.0)
    assert limits_of(short(Judge())) == FunctionLimits(batch_seconds=0.4, row_seconds=0.2)


def test_limits_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be positive \(math.inf for no limit\), got 0.0 and 30.0"):
        LimitedFunction(hangs_on_three, batch_seconds=0.0)


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_values_and_errors_come_through(in_main_thread: bool) -> None:
    found: list[Any] = []

    def calls() -> None:
        found.append(call_within(5.0, divmod, 7, 2))
        with pytest.raises(ZeroDivisionError):
            call_within(5.0, divmod, 7, 0)
        with pytest.raises(OverDeadlineError):
            call_within(0.05, time.sleep, 0.5)
        found.append("end")

    if in_main_thread:
        calls()
    else:
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
    assert found == [(3, 1), "end"]


def test_an_alarm_that_was_set_before_stays() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(OverDeadlineError):
            call_within(0.1, time.sleep, 5.0)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.95
        call_within(60.0, time.sleep, 1.1)  # the earlier alarm rings within
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_too_many_abandoned_threads_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "MAX_ABANDONED", 1)
    raised: list[BaseException] = []

    def calls() -> None:
        for _ in range(2):
            try:
                call_within(0.01, time.sleep, 1.0)
            except BaseException as error:  # noqa: BLE001 - looked at below
                raised.append(error)

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    assert [type(error) for error in raised] == [OverDeadlineError, RewardBrokenError]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "gave a NoneType"),
        ((x for x in (1.0, 2.0)), "gave a generator"),
        ({"a": 1.0}, "gave a dict"),
        ("12", "gave a str"),
    ],
)
def test_what_is_no_list_of_numbers_is_named(given: Any, message: str) -> None:
    def reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> Any:
        return given

    with pytest.raises(ValueError, match=message):
        score(reward, ["", ""], ["a", "b"], [{}, {}])  # type: ignore[arg-type]
