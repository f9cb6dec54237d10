"""The calculator's parser: Python's values, and nothing that is no arithmetic."""

from __future__ import annotations

import ast
import operator
import random
from fractions import Fraction

import pytest

from lightning_rlhf.environments import calculate

_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


def _by_python(node: ast.AST) -> Fraction:
    """The oracle: Python's own grammar, worked out in fractions."""
    match node:
        case ast.Expression(body):
            return _by_python(body)
        case ast.Constant(value):
            return Fraction(str(value))
        case ast.UnaryOp(op, operand):
            return -_by_python(operand) if isinstance(op, ast.USub) else _by_python(operand)
        case ast.BinOp(left, op, right):
            return Fraction(_BINARY[type(op)](_by_python(left), _by_python(right)))
    raise AssertionError(ast.dump(node))


def _random_expression(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice([str(draw.randint(0, 20)), f"{draw.randint(0, 9)}.{draw.randint(0, 99)}"])
    left, right = _random_expression(draw, depth - 1), _random_expression(draw, depth - 1)
    kind = draw.choice(["+", "-", "*", "/", "//", "%", "sign", "brackets", "**"])
    if kind == "sign":
        return f"{draw.choice('+-')}{left}"
    if kind == "brackets":
        return f"({left})"
    if kind == "**":
        return f"{left} ** {draw.choice(['2', '-1', '3', '2 ** 1', '-(1)'])}"
    return f"{left} {kind} {right}"


def test_it_agrees_with_python_on_random_expressions() -> None:
    draw = random.Random(0)
    compared = refused = divided = 0
    for _ in range(2000):
        text = _random_expression(draw, 4)
        try:
            expected = _by_python(ast.parse(text, mode="eval"))
        except ZeroDivisionError:
            with pytest.raises(ValueError, match=r"division by zero|exponent|large"):
                calculate(text)
            divided += 1
            continue
        try:
            found = calculate(text)
        except ValueError as error:
            refused += any(word in str(error) for word in ("large", "characters", "exponent"))
            continue
        compared += 1
        assert (
            Fraction(found) == expected
            if expected.denominator == 1
            else (float(found) == pytest.approx(float(expected), rel=1e-11))
        ), text
    assert compared + refused + divided == 2000
    assert compared > 1500


@pytest.mark.parametrize(
    ("text", "value"),
    [("-2 ** 2", "-4"), ("2 ** 3 ** 2", "512"), ("0.1 + 0.2", "0.3"), ("7 // -2", "-4"), ("2^10", "1024"),
     ("1/3", "0.333333333333"), ("3 \u00d7 4 \u00f7 2 \u2212 1", "5"), ("2**64 * 2**64", str(2**128)), (".5*4", "2")],
)  # fmt: skip
def test_by_hand(text: str, value: str) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "1 +", "(1", "1)", "1 2", "a", "__import__('os')", "1 if 1 else 2", "1e9", "[1]", "1,000", "2 ** 65", "2**.5",
     "9" * 257, "(" * 100 + "1" + ")" * 100, "-" * 100 + "1", "9**64**2", "(2**60)**60", "1/0", "1%0", "0**-1",
     "10**64*10**64*10**64*10**64*10**64*10**64*10**64*10**64*10**64*10**64*10**64"],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_large_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        calculate(text)
