"""An environment in which the policy calls tools until it answers without a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from lightning_rlhf.contracts.environment import (
    Action,
    Environment,
    EnvironmentBrokenError,
    Speaker,
    StepResult,
    Task,
)
from lightning_rlhf.environments.arithmetic import calculate
from lightning_rlhf.environments.tool_calls import BadToolCall, ToolCall, parse_tool_calls

MAX_CALLS_IN_A_TURN = 8
ToolCallParser = Callable[[str], list[ToolCall | BadToolCall]]


class Tool(Protocol):
    """Anything with a name that takes arguments by name and answers in text.

    A ``ValueError``, and a call with other arguments than ``__call__`` names, are told to the policy.
    """

    name: str

    def __call__(self, **arguments: Any) -> str:
        """Answers a call."""


class Calculator:
    """Works out ``expression``; see `calculate`."""

    name = "calculator"

    def __call__(self, **arguments: Any) -> str:
        """The result.

        Raises:
            ValueError: for other arguments, or an expression that cannot be worked out.
        """
        expression = arguments.get("expression")
        if set(arguments) != {"expression"} or not isinstance(expression, str):
            raise ValueError('expected the arguments {"expression": "..."}')
        return calculate(expression)


class ToolEnvironment(Environment):
    """Answers tool calls; a turn without one is the policy's answer and ends the episode.

    A call that cannot be read or made is answered by ``error: ...``, so that the policy may try again. A tool that
    raises anything but a ``ValueError`` fails the episode. What the answer is worth is left to the reward; the
    environment's own is what using tools as such is worth.

    Args:
        tools: that may be called.
        parse: finds the calls in a turn.
        role: who speaks the answers; ``"tool"`` where the chat template has it.
        reward_per_call: for each call that a tool has answered.
        reward_per_error: for each that was answered by an error.

    Raises:
        ValueError: if two tools share a name, or there is none.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (Calculator(),),
        *,
        parse: ToolCallParser = parse_tool_calls,
        role: Speaker = "user",
        reward_per_call: float = 0.0,
        reward_per_error: float = 0.0,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if not tools or len(self._tools) != len(tools):
            raise ValueError(f"ToolEnvironment needs tools of different names, got {[tool.name for tool in tools]}.")
        self._parse = parse
        self._role: Speaker = role
        self._worth: dict[Literal["call", "error"], float] = {"call": reward_per_call, "error": reward_per_error}

    def reset(self, task: Task) -> None:
        """Nothing to set up."""

    def step(self, action: Action) -> StepResult:
        """Answers the turn's calls, each by a line."""
        calls = [] if action.truncated else self._parse(action.text)
        if not calls:
            return StepResult(done=True)
        if len(calls) > MAX_CALLS_IN_A_TURN:
            calls = [BadToolCall(f"{len(calls)} calls in one turn, at most {MAX_CALLS_IN_A_TURN} are answered")]
        answers, reward = [], 0.0
        for call in calls:
            kind, answer = self._answer(call)
            answers.append(answer)
            reward += self._worth[kind]
        return StepResult(observation="\n".join(answers), reward=reward, role=self._role)

    def _answer(self, call: ToolCall | BadToolCall) -> tuple[Literal["call", "error"], str]:
        if isinstance(call, BadToolCall):
            return "error", f"error: {call.reason}"
        if call.name not in self._tools:
            return "error", f"error: there is no tool {call.name[:40]!r}; there is {', '.join(self._tools)}"
        tool = self._tools[call.name]
        try:
            inspect.signature(tool).bind(**call.arguments)
        except TypeError as error:  # of the call: one inside the tool is the tool's own
            return "error", f"error: {error}"
        try:
            return "call", tool(**call.arguments)
        except EnvironmentBrokenError:
            raise
        except ValueError as error:
            return "error", f"error: {error}"
