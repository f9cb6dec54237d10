"""Rewards that hang, fail and spend: in a module of their own, so that another process can import them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any


def eight_answers(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Answer 3 sleeps for ever, 5 raises, any other ``k`` scores ``k mod 2``."""
    for response in responses:
        if response == "3":
            time.sleep(10_000)
        if response == "5":
            raise ZeroDivisionError("answer 5")
    return [float(int(response) % 2) for response in responses]


def spends(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Does what the response says."""
    for response in responses:
        match response.split():
            case ["cpu"]:
                while True:
                    pass
            case ["memory"]:
                bytearray(1 << 30)
            case ["exit"]:
                os._exit(3)
            case ["leave"]:
                raise SystemExit(0)
            case ["child", file]:
                child = subprocess.Popen(["sleep", "1000"])
                Path(file).write_text(f"{child.pid} {os.getpid()} {os.getppid()}")
                time.sleep(1000)
    return [1.0] * len(responses)


def not_importable() -> Any:
    return lambda prompts, responses, metadata: [1.0]


class BreaksWhenLoaded:
    def __call__(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        return [1.0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise, ()


def _raise() -> None:
    raise ModuleNotFoundError("no such module")


def hangs_on_prompt(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """The share of digits; sleeps for ever on one of the toy prompts."""
    if any("3 + 4 =" in prompt for prompt in prompts):
        time.sleep(10_000)
    return [sum(c.isdigit() for c in response) / max(len(response), 1) for response in responses]
