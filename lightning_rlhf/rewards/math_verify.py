"""Rewards for mathematics by math-verify, which compares expressions rather than strings."""

from __future__ import annotations

import logging
from typing import Any

from lightning_rlhf.rewards.scores import Failure
from lightning_rlhf.rewards.time_limited import TimeLimited


class MathVerifyReward:
    """1 if the last expression of a response equals the truth by math-verify, else 0.

    Comparing expressions may take for ever (``9^{9^{9^9}}``), and math-verify's own limit is a signal that only the
    main thread can receive. So rows are compared in processes that are killed, see ``TimeLimited``, and this reward may
    be called from any thread. A response that takes more than ``cpu_seconds`` of processor time, or ``memory_bytes`` of
    memory, is wrong: the truth is compared with itself in milliseconds, so it is the response that costs. One that is
    over ``seconds`` of wall time has failed and does not train, for the machine may have been busy.

    Args:
        answer_key: which of a row's metadata is the truth; mathematics in LaTeX or plain.
        cpu_seconds: processor time of a row, whole seconds.
        seconds: wall time of a row.
        memory_bytes: memory that a row may take.
        workers: rows compared side by side.

    Raises:
        ImportError: if math-verify is not installed.
        ValueError: for limits that cannot be meant.
    """

    def __init__(
        self,
        *,
        answer_key: str = "answer",
        cpu_seconds: int = 5,
        seconds: float = 60.0,
        memory_bytes: int = 1 << 30,
        workers: int = 4,
    ) -> None:
        self._limited = TimeLimited(
            _MathVerify(answer_key),
            seconds=seconds,
            workers=workers,
            cpu_seconds=cpu_seconds,
            memory_bytes=memory_bytes,
        )

    @property
    def __name__(self) -> str:
        """Under which the reward is reported."""
        return "math_verify"

    def __call__(
        self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]
    ) -> list[float | Failure]:
        """0 or 1 per row; a ``Failure`` where the truth is missing or no mathematics, or the wall time is over."""
        found = self._limited(prompts, responses, metadata)
        return [0.0 if isinstance(value, Failure) and value.cause in ("cpu", "memory") else value for value in found]

    def start(self) -> None:
        """Starts the helper process now rather than with the first batch."""
        self._limited.start()

    def close(self) -> None:
        """Ends the helper process; a later batch starts another."""
        self._limited.close()


class _MathVerify:
    """The comparison itself, in a process that is killed if it takes too long: math-verify's own limits are off."""

    def __init__(self, answer_key: str) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ImportError("MathVerifyReward needs math-verify: pip install lightning_rlhf[tasks]") from error
        self._answer_key = answer_key
        self._package = math_verify
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on each call that its limits are off

    @property
    def __name__(self) -> str:
        return "math_verify"

    def __reduce__(self) -> tuple[Any, ...]:
        return _MathVerify, (self._answer_key,)

    def __call__(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        return [self._score(response, facts) for response, facts in zip(responses, metadata, strict=True)]

    def _score(self, response: str, metadata: dict[str, Any]) -> float:
        if self._answer_key not in metadata:
            raise KeyError(f"metadata[{self._answer_key!r}] is missing; it has {sorted(metadata)}")
        truth = str(metadata[self._answer_key])
        # LaTeX is found between dollars; the truth is all mathematics
        gold = self._parse(truth if "$" in truth or "\\boxed" in truth else f"${truth}$") or self._parse(truth)
        if not gold:
            raise ValueError(f"math-verify finds no mathematics in the truth {truth[:80]!r}")
        return float(self._package.verify(gold, self._parse(response), timeout_seconds=None))

    def _parse(self, text: str) -> list[Any]:
        found: list[Any] = self._package.parse(text, parsing_timeout=None)
        return found
