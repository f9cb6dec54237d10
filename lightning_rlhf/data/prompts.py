"""Where prompts come from: JSON Lines files, reasoning-gym tasks, plain lists."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

logger = logging.getLogger(__name__)

ChatMessage = dict[str, str]
"""One message: ``{"role": ..., "content": ...}``, both strings."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt as its source gives it, before the chat template and the tokenizer.

    Attributes:
        uid: identity; differs from that of every other prompt of its source, and is the same on every rank.
        prompt: the user's text, or a list of chat messages.
        metadata: the source's facts about the prompt (the answer, the task), handed to the rewards.

    Raises:
        ValueError: if the prompt is empty or no valid chat.
    """

    uid: str
    prompt: str | list[ChatMessage]
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses what no chat template could render."""
        if reason := _invalid_prompt(self.prompt):
            raise ValueError(f"Prompt {self.uid!r}: {reason}.")

    @property
    def text(self) -> str:
        """What a person reads: the text, a lone message's content, or ``role: content`` lines."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return self.prompt[0]["content"]
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


class PromptSource(Protocol):
    """Anything that gives a list of prompts, the same on every rank and in every run."""

    def load(self) -> list[Prompt]:
        """Reads all prompts, in their fixed order."""


class ListPrompts:
    """Prompts from a list in memory.

    Args:
        prompts: `Prompt` objects, plain texts, or chats; texts and chats get their index in the list as uid.
    """

    def __init__(self, prompts: Sequence[Prompt | str | list[ChatMessage]]) -> None:
        self._prompts = [
            item if isinstance(item, Prompt) else Prompt(uid=str(index), prompt=item)
            for index, item in enumerate(prompts)
        ]

    def load(self) -> list[Prompt]:
        """All prompts, in order.

        Raises:
            ValueError: if the list is empty or a uid is repeated.
        """
        return _checked(list(self._prompts), source="ListPrompts")


class JSONLPrompts:
    """Prompts from a JSON Lines file: one JSON object a line, blank lines ignored.

    A row's prompt is a string or a list of chat messages. Its other keys become the prompt's metadata.

    Args:
        path: the file, UTF-8.
        prompt_key: key of the prompt.
        uid_key: key of the uid (a string or an integer); without it the uid is ``<file name>:<line number>``.
        required_keys: keys that each row must have beside the prompt; ``()`` asks for none.
        on_error: what a bad row does: ``raise`` stops at the first with file, line and reason; ``skip`` keeps the good
            rows in order, and counts and names the others in a warning.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        prompt_key: str = "prompt",
        uid_key: str | None = None,
        required_keys: Sequence[str] = ("answer",),
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")
        if isinstance(required_keys, str):
            raise TypeError(f"required_keys must be a list of keys, got the string {required_keys!r}.")
        self.path = Path(path)
        self.prompt_key = prompt_key
        self.uid_key = uid_key
        self.required_keys = tuple(required_keys)
        self.on_error = on_error
        self.skipped_lines: dict[int, str] = {}
        """Line number to reason, of the rows that the last ``load()`` skipped."""

    def load(self) -> list[Prompt]:
        """Reads the file.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: for a bad row (``on_error="raise"``), a repeated uid, or a file without a single good row.
        """
        if not self.path.is_file():
            raise FileNotFoundError(
                f"JSONLPrompts: there is no file {self.path} (looked for from {Path.cwd()}). Give the path of a JSON "
                "Lines file, one object with a prompt a line."
            )
        self.skipped_lines = {}
        prompts: list[Prompt] = []
        # Decoded line by line, so that bytes that are not UTF-8 are reported with their line.
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                    if text:
                        prompts.append(self._parse(text, number))
                except (ValueError, RecursionError) as error:
                    if self.on_error == "raise":
                        raise ValueError(
                            f"{self.path}, line {number}: {_reason(error)}. Mend the line, or pass on_error='skip' to "
                            "leave bad rows out."
                        ) from error
                    self.skipped_lines[number] = _reason(error)
        if self.skipped_lines:
            listed = "; ".join(f"line {number}: {why}" for number, why in list(self.skipped_lines.items())[:10])
            more = ", ..." if len(self.skipped_lines) > 10 else ""
            logger.warning(
                "%s: skipped %d of %d rows (%s%s)",
                self.path, len(self.skipped_lines), len(self.skipped_lines) + len(prompts), listed, more,
            )  # fmt: skip
        return _checked(prompts, source=str(self.path))

    def _parse(self, line: str, number: int) -> Prompt:
        row = json.loads(line, parse_constant=_refuse_constant)
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, got {_json_type(row)}")
        if missing := [key for key in (self.prompt_key, *self.required_keys) if key not in row]:
            raise ValueError(f"no key {', '.join(map(repr, missing))} (the row has {', '.join(map(repr, row))})")
        if reason := _invalid_prompt(row[self.prompt_key]):
            raise ValueError(f"key {self.prompt_key!r}: {reason}")
        return Prompt(
            uid=self._uid(row, number),
            prompt=row[self.prompt_key],
            metadata={key: value for key, value in row.items() if key not in (self.prompt_key, self.uid_key)},
        )

    def _uid(self, row: Mapping[str, Any], number: int) -> str:
        if self.uid_key is None:
            return f"{self.path.name}:{number}"
        uid = row.get(self.uid_key)
        if isinstance(uid, bool) or not isinstance(uid, str | int) or uid == "":
            raise ValueError(f"key {self.uid_key!r} must be a string or an integer, got {uid!r}")
        return str(uid)


class ReasoningGymPrompts:
    """Questions of a reasoning-gym task, which its own verifier scores.

    Each prompt's metadata holds the ``task``, the ``answer`` and the whole ``entry`` (question, answer, metadata) as
    reasoning-gym made it: some verifiers (``arc_agi``, ``rearc``) tell tuples from lists, so it must not go through
    JSON.

    Args:
        task: a name that ``reasoning_gym.create_dataset`` knows.
        size: number of questions.
        seed: of the questions; another seed gives other questions.
        suffix: appended to each question, such as the wanted format of the answer.
        system_prompt: the chat's system message; None leaves it to the chat template.
        task_config: further arguments of the task, such as its difficulty.
    """

    def __init__(
        self,
        task: str,
        *,
        size: int,
        seed: int,
        suffix: str = "",
        system_prompt: str | None = None,
        task_config: Mapping[str, Any] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}.")
        self.task = task
        self.size = size
        self.seed = seed
        self.suffix = suffix
        self.system_prompt = system_prompt
        self.task_config = dict(task_config or {})

    def load(self) -> list[Prompt]:
        """Makes the questions.

        Raises:
            ImportError: if reasoning-gym is not installed.
            ValueError: if there is no such task, or it refuses its configuration.
        """
        try:
            import reasoning_gym
        except ImportError as error:
            raise ImportError(
                "ReasoningGymPrompts needs reasoning-gym: install it with `pip install 'lightning_rlhf[tasks]'`."
            ) from error
        try:
            dataset = reasoning_gym.create_dataset(self.task, size=self.size, seed=self.seed, **self.task_config)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(
                f"reasoning-gym cannot make the task {self.task!r} with {self.task_config or 'its defaults'}: {error}"
            ) from error
        prompts = []
        for index in range(self.size):
            entry = dataset[index]
            question = entry["question"] + self.suffix
            chat = [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": question}]
            prompts.append(
                Prompt(
                    uid=f"{self.task}-{self.seed}-{index}",
                    prompt=question if self.system_prompt is None else chat,
                    metadata={"task": self.task, "answer": entry["answer"], "entry": entry},
                )
            )
        return _checked(prompts, source=f"reasoning-gym task {self.task!r}")


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """A short hash of the prompts' uids and texts in their order: equal lists have equal fingerprints."""
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(json.dumps([prompt.uid, prompt.prompt]).encode())
    return digest.hexdigest()


def _checked(prompts: list[Prompt], *, source: str) -> list[Prompt]:
    if not prompts:
        raise ValueError(f"{source} holds no usable prompt.")
    repeated = [uid for uid, count in Counter(prompt.uid for prompt in prompts).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{source}: {len(repeated)} uids are used by more than one prompt: {', '.join(map(repr, repeated[:10]))}"
            f"{', ...' if len(repeated) > 10 else ''}. Groups are joined by uid, so each prompt needs its own."
        )
    return prompts


def _invalid_prompt(prompt: object) -> str | None:
    """Why this is neither a text nor a chat; None if it is one."""
    if isinstance(prompt, str):
        return None if prompt else "the prompt is empty"
    if not isinstance(prompt, list):
        return f"expected a string or a list of chat messages, got {_json_type(prompt)}"
    if not prompt:
        return "the chat has no messages"
    for index, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"chat message {index}: expected an object with role and content, got {_json_type(message)}"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                return f"chat message {index}: {key!r} must be a string, got {message.get(key)!r}"
    return None


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 ({error.reason} at byte {error.start + 1})"
    if isinstance(error, RecursionError):
        return "not valid JSON (nested too deeply)"
    return str(error).rstrip(".")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"not valid JSON ({constant} is no JSON value)")
