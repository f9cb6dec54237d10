from __future__ import annotations

import pytest

from lightning_rlhf.rewards import extract_answer


@pytest.mark.parametrize(
    ("response", "first", "last"),
    [
        ("7", "7", "7"),
        ("The answer is 12.", "12", "12"),
        ("4 + 3 = 7", "4", "7"),
        ("4 - 3 = 1", "4", "1"),
        ("8-5", "8", "5"),
        ("-4", "-4", "-4"),
        ("= -4 degrees", "-4", "-4"),
        ("\N{MINUS SIGN}4", "-4", "-4"),
        ("+3", "+3", "+3"),
        ("**15**", "15", "15"),
        ("$1,234,567.", "1234567", "1234567"),
        ("x2 is 3rd of 9", "9", "9"),
        ("12.5 is not whole, 12 is", "12", "12"),
        ("1,23 is no number", None, None),
        ("seven", None, None),
        ("", None, None),
        pytest.param("9" * 5000, "9" * 5000, "9" * 5000, id="5000 digits"),
    ],
)
def test_integers(response: str, first: str | None, last: str | None) -> None:
    assert extract_answer(response, "first_integer") == first
    assert extract_answer(response, "last_integer") == last


def test_none_takes_the_whole_response() -> None:
    assert extract_answer("  a b \n", "none") == "a b"
    assert extract_answer(" \n", "none") is None


def test_refuses_an_unknown_extraction() -> None:
    with pytest.raises(ValueError, match="'middle'; expected one of none, first_integer, last_integer"):
        extract_answer("1", "middle")  # type: ignore[arg-type]
