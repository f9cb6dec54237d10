"""Environments that come with the package: tools that the policy calls.

A game or a service of one's own is a subclass of `Environment`: ``reset`` and ``step``.
"""

from __future__ import annotations

from lightning_rlhf.contracts.environment import (
    Action,
    Environment,
    EnvironmentBrokenError,
    EnvironmentFactory,
    StepResult,
    Task,
)
from lightning_rlhf.environments.arithmetic import calculate
from lightning_rlhf.environments.tool_calls import BadToolCall, ToolCall, parse_tool_calls
from lightning_rlhf.environments.tools import Calculator, Tool, ToolEnvironment

__all__ = [
    "Action",
    "BadToolCall",
    "Calculator",
    "Environment",
    "EnvironmentBrokenError",
    "EnvironmentFactory",
    "StepResult",
    "Task",
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "calculate",
    "parse_tool_calls",
]
