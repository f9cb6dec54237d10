"""The rollout contract: an engine that samples responses from the policy's current weights."""

from __future__ import annotations

import hashlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.types import PromptBatch, Rollouts


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A form that every response has: what would leave it cannot be sampled. Exactly one of the three is given.

    Attributes:
        regex: a regular expression that the whole response matches.
        json_schema: a JSON schema that it follows.
        choice: texts, one of which it is.

    Raises:
        ValueError: for none or several of them.
    """

    regex: str | None = None
    json_schema: Mapping[str, Any] | None = None
    choice: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        given = [self.regex is not None, self.json_schema is not None, bool(self.choice)]
        if sum(given) != 1 or isinstance(self.choice, str):
            raise ValueError(f"A Guide has one of regex, json_schema and choice (a list of texts), got {self}.")


LOWEST_TEMPERATURE = 0.01
"""Above 0: vLLM samples at this one when asked for less, and the trainer's log-probs would be at what was asked."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How responses are drawn.

    Attributes:
        n: responses for each prompt (the group's size, G).
        max_new_tokens: limit on a response's tokens.
        temperature: divides the logits; 0 is greedy. Nothing between 0 and 0.01, which vLLM would raise to 0.01.
        top_p: nucleus mass kept, 1 keeps all.
        top_k: candidates kept, 0 keeps all.
        min_p: candidates below this share of the most likely one are dropped.
        stop: strings that end a response; ids and log-probs end at the token that completes the string.
        stop_token_ids: ids that end a response, beside the tokenizer's EOS; kept in it.
        seed: base seed, 0 or more; each request's seed is derived from it.
        guide: a form that responses have; log-probs are then those of the distribution without what would leave it.

    Raises:
        ValueError: if a number is out of its range, or one text stands where a list of them is expected.
        TypeError: if a count or an id is no integer, or the guide is none.
    """

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: Sequence[str] = field(default_factory=tuple)
    stop_token_ids: Sequence[int] = field(default_factory=tuple)
    seed: int = 0
    guide: Guide | None = None

    def __post_init__(self) -> None:
        """Refuses numbers out of range, and what Python would take for something else."""
        self._check_types()
        if self.n < 1 or self.max_new_tokens < 1:
            raise ValueError(f"n={self.n} and max_new_tokens={self.max_new_tokens} must be at least 1.")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}.")
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which would end every response at its first token.")
        warm = self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < math.inf
        if not warm or not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.min_p <= 1:
            raise ValueError(
                f"Sampling out of range: temperature={self.temperature} (0, or >= {LOWEST_TEMPERATURE}), "
                f"top_p={self.top_p} (0 to 1], top_k={self.top_k} (>= 0, 0 keeps all), min_p={self.min_p} (0 to 1)."
            )

    def _check_types(self) -> None:
        if isinstance(self.stop, str):
            raise ValueError(
                f"stop is a list of texts, got {self.stop!r}, each letter of which would end a response: say "
                f"stop=[{self.stop!r}]."
            )
        for name in ("n", "max_new_tokens", "top_k", "seed"):
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"{name}={getattr(self, name)!r} must be an integer.")
        if isinstance(self.stop_token_ids, int | str) or not all(isinstance(one, int) for one in self.stop_token_ids):
            raise TypeError(f"stop_token_ids={self.stop_token_ids!r} must be a list of ids.")
        if self.guide is not None and not isinstance(self.guide, Guide):
            raise TypeError(f"guide={self.guide!r} must be a Guide, for example rl.Guide(regex='[0-9]+').")


def request_seed(base_seed: int, *, rl_step: int, uid: str, sample_index: int) -> int:
    """The seed of one request: a hash, so that samples do not depend on ranks, replicas or order.

    Returns:
        An integer in [0, 2**63).
    """
    key = f"{base_seed}/{rl_step}/{sample_index}/{uid}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, kw_only=True)
class TensorRows:
    """A rank's part of a tensor that is cut over ranks along its first dimension.

    Attributes:
        rows: ``[n, ...]``, the rank's own.
        first: number of the first of them in the whole tensor.
        num_rows: of the whole tensor.
    """

    rows: Tensor
    first: int
    num_rows: int


class RolloutEngine(ABC):
    """Samples responses; holds a copy of the policy's weights with a version.

    ``weight_version`` is None until weights were pushed, and again after a push that failed half-way: such an engine
    refuses to generate. Ids and log-probs come from the engine as sampled, never from re-encoded text.
    ``max_model_len`` is the limit on prompt and response together.
    """

    weight_version: int | None = None
    max_model_len: int = sys.maxsize

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the engine computes in; bfloat16 alone moves log-probs by up to some tenths of a nat."""
        return torch.float32

    @property
    def longest_wait(self) -> float:
        """How long this rank may wait for other processes when it brings weights, in seconds; not the trainer's."""
        return 0.0

    @abstractmethod
    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, rl_step: int) -> Rollouts:
        """Draws ``sampling.n`` responses for each prompt.

        Returns:
            ``len(prompts) * n`` rows in order (prompt, sample index). A prompt that leaves no room for a response gives
            rows with finish reason ``skipped`` and an empty response mask.

        Raises:
            RuntimeError: if no weights were pushed.
        """

    @abstractmethod
    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of each id given those before it, under the engine's weights; 0 for a sequence's first id."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """What a rank does between two points that all ranks reach: any number of `generate` calls, none among them.

        Ranks that share one engine's model compute together, so one that has nothing left to ask works on for the
        others until the last of them is done. Collective over these; an engine of one rank has nothing to wait for.
        """
        yield

    def stand_by(self) -> None:
        """A session in which this rank samples nothing: others may need it in theirs. Collective, as `session`."""
        with self.session():
            pass

    @abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the weights in place, by Hugging Face name. Does not set the version: the manager does."""

    def weight_destinations(self) -> Mapping[str, Tensor]:
        """The engine's own tensors, by name, that `load_weights` fills by copying one tensor of the push as it is.

        A push from another process may be written there at once, and `load_weights` is then given these tensors.
        """
        return {}

    @abstractmethod
    def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The engine's own copy of the named tensors, for those it holds under that name and layout; others absent."""

    def read_rows(self, names: Sequence[str]) -> dict[str, TensorRows]:
        """Copies of the engine's own rows of the named tensors, for those that are cut over several ranks' engines."""
        return {}

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forgets keys and values that older weights computed."""

    @abstractmethod
    def abort(self) -> None:
        """Ends all requests in flight; their partial responses are kept with finish reason ``abort``."""

    @abstractmethod
    def pause(self) -> None:
        """Stops sampling between two tokens; requests stay."""

    @abstractmethod
    def resume(self) -> None:
        """Goes on after ``pause``."""

    @abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Gives device memory back: 1 keeps the weights on the host, 2 drops them (a push must follow)."""

    @abstractmethod
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes memory again, for ``weights`` or ``kv_cache`` or both; weights before a push, the cache after it."""

    @abstractmethod
    def release_kv_cache(self) -> None:
        """Gives the cache's memory back, where the device allows it."""

    @abstractmethod
    def shutdown(self) -> None:
        """Frees the engine; leaves the trainer's process group alone."""
