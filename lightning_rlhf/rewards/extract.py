"""Finding the answer in a response."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, get_args

Extraction: TypeAlias = Literal["none", "first_integer", "last_integer"]

# An integer stands by itself: neither part of a word or of a decimal, nor with a comma inside but in groups of three.
_INTEGER = re.compile(r"(?<![\w.,])[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?![\w])(?![.,][0-9])")


def extract_answer(response: str, extraction: Extraction) -> str | None:
    """The part of a response that is compared with the truth.

    Args:
        response: the response's text.
        extraction: ``none`` for the whole response without surrounding blanks, or which integer in it; thousands may
            be separated by commas, which are dropped.

    Returns:
        The answer, or None if the response holds none.

    Raises:
        ValueError: for an unknown ``extraction``.
    """
    if extraction == "none":
        return response.strip() or None
    if extraction not in get_args(Extraction):
        raise ValueError(f"Unknown extraction {extraction!r}; expected one of {', '.join(get_args(Extraction))}.")
    found = _INTEGER.findall(response.replace("\N{MINUS SIGN}", "-"))
    if not found:
        return None
    return str(found[0 if extraction == "first_integer" else -1]).replace(",", "")
