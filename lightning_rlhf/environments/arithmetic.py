"""Arithmetic on text that a model wrote: an own parser, exact, bounded in size, depth and the numbers it makes."""

from __future__ import annotations

import re
from fractions import Fraction

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|(\*\*|//|[-+*/%^()]))")
MAX_CHARACTERS = 256
MAX_DEPTH = 32
MAX_BITS = 2048
"""Of numerator and denominator of every number on the way."""
MAX_EXPONENT = 64
_SIGNIFICANT_DIGITS = 12


def calculate(expression: str) -> str:
    """The value of an expression of ``+ - * / // % ** ^ ( )`` and decimal numbers; ``^`` is ``**``.

    Fractions are exact on the way, and every operator binds as in Python. The result is an integer's digits, or a
    decimal number rounded to 12 significant digits.

    Raises:
        ValueError: if it is no such expression, divides by 0, or is larger than the limits of this module.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_CHARACTERS} are taken")
    parser = _Parser(_tokens(expression))
    value = parser.sum_(0)
    if parser.peek():
        raise ValueError(f"unexpected {parser.peek()!r}")
    return _as_text(value)


def _tokens(expression: str) -> list[str]:
    text = expression.replace("\N{MULTIPLICATION SIGN}", "*").replace("\N{DIVISION SIGN}", "/")
    text = text.replace("\N{MINUS SIGN}", "-").strip()
    found: list[str] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"unexpected {text[place:].strip()[:12]!r}")
        found.append(match.group().strip())
        place = match.end()
    return found


class _Parser:
    """Recursive descent; each method takes how deep it is."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0

    def peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self.peek()
        self._place += 1
        return token

    def sum_(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.peek() in ("+", "-"):
            operator, right = self._take(), self._product(depth)
            value = _bounded(value + right if operator == "+" else value - right)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while self.peek() in ("*", "/", "//", "%"):
            operator, right = self._take(), self._signed(depth)
            if operator == "*":
                value = _bounded(value * right)
                continue
            if right == 0:
                raise ValueError("division by zero")
            if operator == "/":
                value = _bounded(value / right)
            else:
                value = _bounded(Fraction(value // right) if operator == "//" else value % right)
        return value

    def _signed(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        if self.peek() in ("+", "-"):
            sign = self._take()
            value = self._signed(depth + 1)
            return -value if sign == "-" else value
        return self._power(depth)

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if self.peek() not in ("**", "^"):
            return base
        self._take()
        exponent = self._signed(depth + 1)  # binds to the right, and takes a sign: 2 ** -1
        if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
            raise ValueError(f"the exponent must be an integer of at most {MAX_EXPONENT}")
        if base == 0 and exponent < 0:
            raise ValueError("division by zero")
        if max(abs(base.numerator), base.denominator).bit_length() * abs(int(exponent)) > 2 * MAX_BITS:
            raise ValueError("the power is too large")
        return _bounded(Fraction(base ** int(exponent)))

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token == "(":
            value = self.sum_(depth + 1)
            if self._take() != ")":
                raise ValueError("a bracket is not closed")
            return value
        if not token:
            raise ValueError("the expression ends too early")
        if not (token[0].isdigit() or token[0] == "."):
            raise ValueError(f"unexpected {token!r}")
        return _bounded(Fraction(token))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("a number is too large")
    return value


def _as_text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{_SIGNIFICANT_DIGITS}g}"
    except OverflowError as error:
        raise ValueError("the result is too large") from error
