"""Tool calls in what the policy wrote: JSON between two tags, read as data and never evaluated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CHARACTERS = 16_384


@dataclass(frozen=True)
class ToolCall:
    """A call that can be made.

    Attributes:
        name: of the tool.
        arguments: by name.
    """

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BadToolCall:
    """What stands where a call should, and is none.

    Attributes:
        reason: for the policy to read.
    """

    reason: str


def parse_tool_calls(text: str, *, open_tag: str = OPEN, close_tag: str = CLOSE) -> list[ToolCall | BadToolCall]:
    """The calls in a turn, in order: ``<tool_call>{"name": "...", "arguments": {...}}</tool_call>``.

    Args:
        text: the turn.
        open_tag: before a call.
        close_tag: behind it.

    Returns:
        One entry for each ``open_tag``, whatever stands behind it.
    """
    calls: list[ToolCall | BadToolCall] = []
    for part in text.split(open_tag)[1:]:
        body, closed, _ = part.partition(close_tag)
        calls.append(_parse(body) if closed else BadToolCall(f"the call is not closed by {close_tag}"))
    return calls


def _parse(body: str) -> ToolCall | BadToolCall:
    if len(body) > MAX_CHARACTERS:
        return BadToolCall(f"the call has {len(body)} characters, at most {MAX_CHARACTERS} are taken")
    try:
        call = json.loads(body, parse_constant=_refuse, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        return BadToolCall(f"the call is not valid JSON: {error.msg}")
    except RecursionError:
        return BadToolCall("the call is nested too deeply")
    except ValueError as error:  # a repeated key, NaN, an integer of thousands of digits
        return BadToolCall(f"the call is not valid JSON: {error}")
    if not isinstance(call, dict):
        return BadToolCall("the call must be a JSON object with name and arguments")
    try:
        json.dumps(call, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # what a tool answers with it could not be encoded for the policy
        return BadToolCall("the call holds half of a surrogate pair, which is no character")
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return BadToolCall("the call needs a string as name and an object as arguments")
    return ToolCall(name=name, arguments=arguments)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON value")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is repeated")
        found[key] = value
    return found
