"""Tool calls are read as data, and answered in a way that the policy can read."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.environments import (
    Action,
    BadToolCall,
    Calculator,
    Task,
    ToolCall,
    ToolEnvironment,
    parse_tool_calls,
)


def _call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def _action(text: str, *, truncated: bool = False) -> Action:
    return Action(text=text, token_ids=[1], turn=0, truncated=truncated)


def test_calls_are_found_in_order() -> None:
    text = f"so {_call(chr(123) + chr(34) + 'name' + chr(34) + ': ' + chr(34) + 'a' + chr(34) + chr(125))} and "
    text += _call('\n{"name": "b", "arguments": {"x": [1, 2.5, null]}}\n')
    assert parse_tool_calls(text) == [ToolCall("a", {}), ToolCall("b", {"x": [1, 2.5, None]})]
    assert parse_tool_calls("no call, though </tool_call>") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "a"}', "not closed"),
        (_call("{name: a}"), "not valid JSON"),
        (_call('{"name": "a", "arguments": {"x": ["\\ud800"]}}'), "half of a surrogate pair"),
        (_call('{"name": "\\udfff"}'), "half of a surrogate pair"),
        (_call('["a"]'), "JSON object"),
        (_call('{"name": 3}'), "string as name"),
        (_call('{"name": "a", "arguments": "x"}'), "object as arguments"),
        (_call('{"name": "a", "name": "b"}'), "repeated"),
        (_call('{"name": "a", "arguments": {"x": NaN}}'), "NaN"),
        (_call('{"name": "a", "arguments": ' + "[" * 5000 + "]" * 5000 + "}"), "deep"),
        (_call('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}"), "not valid JSON"),
        (_call(" " * 17000), "characters"),
        (_call("__import__('os').system('true')"), "not valid JSON"),
    ],
)
def test_what_is_no_call_says_why(text: str, reason: str) -> None:
    (call,) = parse_tool_calls(text)
    assert isinstance(call, BadToolCall)
    assert reason in call.reason


def test_the_calculator_answers_and_the_turn_without_a_call_ends() -> None:
    environment = ToolEnvironment(reward_per_call=0.5, reward_per_error=-0.25)
    environment.reset(Task(uid="a", sample_index=0, prompt="", metadata={}, seed=0))
    good = _call('{"name": "calculator", "arguments": {"expression": "12 * 3"}}')
    result = environment.step(_action(good + _call("{}")))
    assert (result.done, result.reward) == (False, 0.25)
    assert result.observation == "36\nerror: the call needs a string as name and an object as arguments"
    unknown = environment.step(_action(_call('{"name": "shell", "arguments": {}}')))
    assert unknown.observation == "error: there is no tool 'shell'; there is calculator"
    wrong = environment.step(_action(_call('{"name": "calculator", "arguments": {"expression": "1/0"}}')))
    assert wrong.observation == "error: division by zero"
    other = environment.step(_action(_call('{"name": "calculator", "arguments": {"code": "1"}}')))
    assert other.observation.startswith("error: expected the arguments")
    many = environment.step(_action(good * 9))
    assert "at most 8" in many.observation
    assert environment.step(_action("the answer is 36")).done
    assert environment.step(_action(good, truncated=True)).done


def test_a_tool_that_breaks_is_not_told_to_the_policy() -> None:
    class Broken:
        name = "broken"

        def __call__(self, **arguments: Any) -> str:
            raise OSError("no route to host")

    with pytest.raises(OSError, match="no route"):
        ToolEnvironment([Broken()]).step(_action(_call('{"name": "broken"}')))


def test_arguments_that_a_tool_does_not_take_are_told_to_the_policy() -> None:
    class Doubled:
        name = "doubled"

        def __call__(self, *, number: int) -> str:
            return str(number + number)  # text and number do not add up

    environment = ToolEnvironment([Doubled()])

    def answer(arguments: str) -> str:
        return environment.step(_action(_call(f'{{"name": "doubled", "arguments": {arguments}}}'))).observation

    assert answer('{"number": 4}') == "8"
    assert answer("{}") == "error: missing a required argument: 'number'"
    assert answer('{"numbre": 4}').startswith("error: ")
    with pytest.raises(TypeError):  # its own mistake fails the episode
        answer('{"number": {}}')


def test_an_emoji_in_two_halves_is_a_character() -> None:
    assert parse_tool_calls(_call('{"name": "\\ud83d\\ude00"}')) == [ToolCall("\N{GRINNING FACE}", {})]


def test_tools_have_names_of_their_own() -> None:
    for tools in ([], [Calculator(), Calculator()]):
        with pytest.raises(ValueError, match="different names"):
            ToolEnvironment(tools)
