"""Rewards for mathematics with a known answer."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

# GSM8K writes its answers as "#### 42": an optional sign and currency, digits with or without commas, decimals.
_NUMBER = r"\$?([-+]?)\$?([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
# What makes "5/2", "5^2", "5e3", "5:30" or "3.5.1" another number than the one that it begins with.
_MORE = r"([/:^.][0-9]|\*\*|[eE][-+]?[0-9])?"
_MARKED_NUMBER = re.compile(rf"####[ \t]*{_NUMBER}{_MORE}")
_PLAIN_NUMBER = re.compile(rf"\s*{_NUMBER}\s*")


def gsm8k_reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """1 if the number behind the response's last ``####`` equals the truth, else 0.

    Text may follow the number. Numbers are compared exactly and as decimals, at any length: ``1,234.0`` equals
    ``1234``. A response without a marked number is wrong, and so is one whose last is part of an expression, ``5/2``.

    Args:
        prompts: not read.
        responses: ``B`` responses.
        metadata: each with ``answer``, a number or a GSM8K solution that ends in ``#### number``.

    Returns:
        ``B`` rewards, each 0 or 1.

    Raises:
        KeyError: if a row has no ``answer``.
        ValueError: if a row's ``answer`` holds no number.
    """
    del prompts
    return [
        float(_last_marked(response) == _truth(facts["answer"]))
        for response, facts in zip(responses, metadata, strict=True)
    ]


def _last_marked(text: str) -> Decimal | None:
    found = _MARKED_NUMBER.findall(text)
    if not found:
        return None
    sign, digits, more = found[-1]
    return None if more else _decimal(sign, digits)


def _truth(answer: Any) -> Decimal:
    text = str(answer)
    plain = _PLAIN_NUMBER.fullmatch(text)
    truth = _decimal(*plain.groups()) if plain else _last_marked(text)
    if truth is None:
        raise ValueError(f"The truth must be a number or end in '#### number', got {text[:80]!r}.")
    return truth


def _decimal(sign: str, digits: str) -> Decimal:
    # Decimal compares exactly at any length, where int() refuses more than 4300 digits and float rounds
    return Decimal(sign + digits.replace(",", ""))
