"""A reward for programs: a response's code is run against tests, never in this process."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_rlhf.rewards.sandbox import SandboxLimits, SandboxResult, run_sandboxed
from lightning_rlhf.rewards.scores import Failure

_FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# Runs the solution, then the tests in the solution's names, then prints a word that the solution was not given: neither
# an early exit nor a printed "ok" passes for a passed test.
_ASSERTIONS = """\
import pathlib, sys
word = sys.stdin.readline()
names = {"__name__": "solution"}
for file in ("solution.py", "tests.py"):
    exec(compile(pathlib.Path(__file__).with_name(file).read_text(encoding="utf-8"), file, "exec"), names)
sys.stdout.write("\\n" + word)
"""


class CodeReward:
    """Scores a Python program by the tests that it passes; each test is a process under limits, see ``SandboxLimits``.

    ``metadata["tests"]`` is a list, each element of which is either ``{"input": ..., "output": ...}``, what the program
    reads and must print (blanks at line ends and around the whole do not count), or a string of Python statements,
    ``assert`` mostly, that run after the program in the same names. A program that is over a limit has not passed.

    A program that sets out to pass assertions without solving them runs in their interpreter and can; ``input`` and
    ``output`` leave it no such way.

    Args:
        limits: of each test.
        workers: processes side by side.
        all_or_nothing: 1 for all tests passed and else 0; False gives the share that is passed.
        fenced: the program is the response's last block between triple backticks, and a response without one scores 0;
            False takes the whole response.
        tests_key: which of a row's metadata holds the tests.

    Raises:
        ValueError: if ``workers`` is not positive.
    """

    __name__ = "code"

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        workers: int = 4,
        all_or_nothing: bool = True,
        fenced: bool = True,
        tests_key: str = "tests",
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}.")
        self.limits = limits or SandboxLimits()
        self.workers = workers
        self.all_or_nothing = all_or_nothing
        self.fenced = fenced
        self.tests_key = tests_key

    def __call__(
        self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]
    ) -> list[float | Failure]:
        """0 to 1 per row; a ``Failure`` where the tests are missing or malformed."""
        rows = [self._tests(facts) for facts in metadata]
        programs = [self._program(response) for response in responses]
        with ThreadPoolExecutor(self.workers, thread_name_prefix="code_reward") as pool:
            running = [
                [pool.submit(_passes, program, test, self.limits) for test in tests]
                if program is not None and not isinstance(tests, Failure)
                else []
                for program, tests in zip(programs, rows, strict=True)
            ]
            passed = [[one.result() for one in tests] for tests in running]
        return [
            tests if isinstance(tests, Failure) else self._value(found)
            for tests, found in zip(rows, passed, strict=True)
        ]

    def _value(self, passed: Sequence[bool]) -> float:
        if not passed:  # no program, for a row without tests has failed
            return 0.0
        return float(all(passed)) if self.all_or_nothing else sum(passed) / len(passed)

    def _program(self, response: str) -> str | None:
        if not self.fenced:
            return response
        found = _FENCED.findall(response)
        return str(found[-1]) if found else None

    def _tests(self, metadata: dict[str, Any]) -> list[str | dict[str, str]] | Failure:
        tests = metadata.get(self.tests_key)
        if not isinstance(tests, list) or not tests:
            found = f"got {tests!r:.60}; metadata has {sorted(metadata)}"
            return Failure(f"metadata[{self.tests_key!r}] must be a list of tests, {found}")
        for test in tests:
            if not isinstance(test, str) and not (isinstance(test, dict) and {"input", "output"} <= test.keys()):
                return Failure(f"a test is a string or has 'input' and 'output', got {test!r:.60}")
        return tests


def _passes(program: str, test: str | dict[str, str], limits: SandboxLimits) -> bool:
    if isinstance(test, dict):
        result = run_sandboxed({"main.py": program}, stdin=str(test["input"]), limits=limits)
        return result.succeeded and _lines(result.stdout) == _lines(str(test["output"]))
    return _passes_assertions(program, test, limits)


def _passes_assertions(program: str, test: str, limits: SandboxLimits) -> bool:
    word = secrets.token_hex(16)
    sources = {"main.py": _ASSERTIONS, "solution.py": program, "tests.py": test}
    result: SandboxResult = run_sandboxed(sources, stdin=word + "\n", limits=limits)
    return result.succeeded and result.stdout.rstrip("\n").rpartition("\n")[2] == word


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
