"""Rewards are plain callables; ``score`` calls one and isolates the rows on which it fails.

A row that could not be scored is NaN and counted, never 0: a 0 would say that the answer is wrong.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from lightning_rlhf.rewards.deadline import OverDeadlineError, call_within, limits_of
from lightning_rlhf.rewards.scores import Failure, RewardBrokenError, Scores

if TYPE_CHECKING:
    RewardFunction: TypeAlias = Callable[
        [list[str], list[str], list[dict[str, Any]]], Sequence[float | Failure | None] | Tensor
    ]
else:
    # LightningCLI's parser reads types at run time, and takes a class that a callable returns (Tensor, Failure) for the
    # class to be built by it: functions that return lists would be refused.
    RewardFunction: TypeAlias = Callable[[list[str], list[str], list[dict[str, Any]]], Any]
"""``reward(prompts, responses, metadata)`` gives one number per response; None, NaN or a ``Failure`` where it has no
verdict."""

_FP32_MAX = torch.finfo(torch.float32).max

MAX_ERRORS = 5
"""How many failed rows are described; all are counted."""


class WeightedRewards:
    """Several rewards as one: the weighted sum of what each gives.

    They are called side by side, each in a thread of its own, so that the slowest sets the time. A row on which any
    component fails has failed, for a sum without it would mean something else. A component of weight 0 is reported and
    neither adds to the reward nor fails a row.

    Args:
        rewards: pairs of a reward and its weight.
        concurrent: False calls one after the other, for rewards that share what no lock guards.

    Raises:
        ValueError: if there is no pair, or a weight is not finite.
    """

    def __init__(self, rewards: Sequence[tuple[RewardFunction, float]], *, concurrent: bool = True) -> None:
        if not rewards:
            raise ValueError("WeightedRewards needs at least one (reward, weight) pair, got none.")
        self.rewards = [(reward, float(weight)) for reward, weight in rewards]
        self.names = _unique([reward_name(reward) for reward, _ in self.rewards])
        self.concurrent = concurrent
        for name, (_, weight) in zip(self.names, self.rewards, strict=True):
            if not math.isfinite(weight):
                raise ValueError(f"The weight of {name} must be finite, got {weight}.")

    def score(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> Scores:
        """Scores every component by itself, so that one failure leaves the others' values known."""
        parts = self._parts(prompts, responses, metadata)
        total = torch.zeros(len(responses), dtype=torch.float64)
        for name, (_, weight) in zip(self.names, self.rewards, strict=True):
            if weight != 0.0:
                total = total + weight * parts[name].rewards.double()
        rewards = _finite_or_nan(total)
        return Scores(
            rewards=rewards,
            num_failed=int(rewards.isnan().sum()),
            errors=[error for part in parts.values() for error in part.errors][:MAX_ERRORS],
            components={name: part.rewards for name, part in parts.items()},
            weights={name: weight for name, (_, weight) in zip(self.names, self.rewards, strict=True)},
            failures={name: part.num_failed for name, part in parts.items()},
        )

    def _parts(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> dict[str, Scores]:
        def part(index: int) -> Scores:
            # lists of its own: a reward that sorts or changes its arguments must not do so to the others
            rows = list(prompts), list(responses), list(metadata)
            return _score_one(self.rewards[index][0], self.names[index], *rows)

        if not self.concurrent or len(self.rewards) == 1:
            return {name: part(index) for index, name in enumerate(self.names)}
        with ThreadPoolExecutor(len(self.rewards), thread_name_prefix="reward") as pool:
            return dict(zip(self.names, pool.map(part, range(len(self.names))), strict=True))

    def __call__(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        """The weighted sums, NaN where a component failed."""
        return [float(value) for value in self.score(prompts, responses, metadata).rewards]


def score(reward: RewardFunction, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> Scores:
    """Calls a reward on a batch.

    If the call raises, the reward is called again on one row at a time and only the rows that raise by themselves
    fail; a reward with side effects must therefore bear a second call on a row. So it is if a plain function takes
    longer than ``FunctionLimits`` says, and a row that hangs by itself fails. None, NaN and infinity fail their row.

    Args:
        reward: any callable of ``(prompts, responses, metadata)``, or ``WeightedRewards``.
        prompts: ``B`` prompt texts.
        responses: ``B`` response texts.
        metadata: ``B`` dictionaries, what the data source said about the prompt.

    Returns:
        Rewards with failures as NaN, their count and reasons.

    Raises:
        ValueError: if the three lists differ in length, or the reward gives another number of values than it got
            responses: then no value can be told to belong to a row.
        RewardBrokenError: if the reward raises it: a second call would do no better.
    """
    sizes = {"prompts": len(prompts), "responses": len(responses), "metadata": len(metadata)}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"A reward needs one prompt, response and metadata per row, got {sizes}.")
    if isinstance(reward, WeightedRewards):
        return reward.score(prompts, responses, metadata)
    return _score_one(reward, reward_name(reward), prompts, responses, metadata)


def reward_name(reward: RewardFunction) -> str:
    """The name under which a reward is reported: the function's, or the class's for a callable object."""
    if isinstance(reward, functools.partial):
        return reward_name(reward.func)
    return str(getattr(reward, "__name__", type(reward).__name__))


def _score_one(
    reward: RewardFunction, name: str, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]
) -> Scores:
    limits = limits_of(reward)
    batch_seconds, row_seconds = (limits.batch_seconds, limits.row_seconds) if limits else (math.inf, math.inf)
    rows = zip(prompts, responses, metadata, strict=True)
    try:
        given = call_within(batch_seconds, reward, prompts, responses, metadata)
    except RewardBrokenError:
        raise
    except OverDeadlineError as over:
        warnings.warn(
            f"Reward {name}, called with {len(responses)} rows, is {over}. It is called row by row. LimitedFunction "
            "gives it other limits; TimeLimited gives each row one.",
            stacklevel=2,
        )
        values = [row_value(reward, *row, seconds=row_seconds) for row in rows]
    except Exception:  # noqa: BLE001 - a user's code may raise anything; each row's own error is kept below
        values = [row_value(reward, *row, seconds=row_seconds) for row in rows]
    else:
        _check_length(name, given, len(responses))
        values = [_as_number(value) for value in given]
    failures = {row: value.reason for row, value in enumerate(values) if isinstance(value, Failure)}
    rewards = torch.tensor([math.nan if isinstance(value, Failure) else value for value in values])
    errors = [f"row {row}, {name}: {reason}" for row, reason in failures.items()]
    return Scores(
        rewards=rewards,
        num_failed=len(failures),
        errors=errors[:MAX_ERRORS],
        components={name: rewards},
        weights={name: 1.0},
        failures={name: len(failures)},
    )


def row_value(
    reward: RewardFunction, prompt: str, response: str, metadata: dict[str, Any], *, seconds: float = math.inf
) -> float | Failure:
    """What a reward gives for one row, asked for it alone.

    Args:
        reward: any callable of ``(prompts, responses, metadata)``.
        prompt: the row's.
        response: likewise.
        metadata: likewise.
        seconds: wall time after which the row has failed.

    Raises:
        ValueError: if it does not give one value.
        RewardBrokenError: if the reward itself does.
    """
    try:
        given = call_within(seconds, reward, [prompt], [response], [metadata])
    except RewardBrokenError:
        raise
    except OverDeadlineError as over:
        return Failure(str(over), "wall")
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything; the reason is reported with the row
        return Failure(f"{type(error).__name__}: {error}", "memory" if isinstance(error, MemoryError) else "error")
    _check_length(reward_name(reward), given, 1)
    return _as_number(given[0])


def _check_length(name: str, given: Any, expected: int) -> None:
    if not isinstance(given, Sized) or isinstance(given, str | bytes | Mapping):
        raise ValueError(
            f"Reward {name} gave a {type(given).__name__}; it must give a list with one number per response, in order."
        )
    if len(given) != expected:
        raise ValueError(
            f"Reward {name} gave {len(given)} values for {expected} responses; it must give one per response, in order "
            "(None for a row that it cannot score)."
        )


def _as_number(value: Any) -> float | Failure:
    """The value as a finite fp32 number, or why it is none."""
    if value is None or isinstance(value, Failure):
        return value or Failure("gave None")
    if isinstance(value, str):
        return Failure(f"gave a string, {value[:40]!r}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return Failure(f"gave a {type(value).__name__}: {error}")
    return number if abs(number) <= _FP32_MAX else Failure(f"gave {number}, not a finite fp32 number")


def _finite_or_nan(values: Tensor) -> Tensor:
    """fp32, with NaN for what is not finite in fp32."""
    rewards = values.float()
    return rewards.masked_fill(~rewards.isfinite(), torch.nan)


def _unique(names: list[str]) -> list[str]:
    """Numbers the second and later uses of a name."""
    taken: set[str] = set()
    for position, name in enumerate(names):
        number, candidate = 1, name
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        taken.add(candidate)
        names[position] = candidate
    return names
