"""The environment contract: what answers the policy between two of its turns, and says what an episode was worth."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Speaker: TypeAlias = Literal["user", "tool", "system"]

EPISODE_KEY = "episode"
"""Entry of a rollout's metadata that holds its episode: reward, turns, failure, transcript."""


class EnvironmentBrokenError(RuntimeError):
    """Raised by an environment that cannot go on at all; it ends the run, where another error fails its episode."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an episode is about.

    Attributes:
        uid: the prompt's identity.
        sample_index: which episode of the prompt's group this is, from 0.
        prompt: the prompt's text, which the policy has seen when its first turn comes.
        metadata: the data source's facts about the prompt (the answer, the hidden number); the episode's own copy.
        seed: for what the environment draws; the same for all episodes of a group in one RL step, so that they differ
            by what the policy does alone.
    """

    uid: str
    sample_index: int
    prompt: str
    metadata: dict[str, Any]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Action:
    """One turn of the policy.

    Attributes:
        text: what its ids decode to, special tokens left out.
        token_ids: as sampled; the id that ended the turn included.
        turn: from 0.
        truncated: whether a limit on tokens cut it short; the episode ends with it, whatever the environment says.
    """

    text: str
    token_ids: list[int]
    turn: int
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What the environment makes of a turn.

    Attributes:
        observation: text that the policy sees before its next turn; not read if the episode is over.
        reward: of this turn; an episode's reward is the sum over its turns.
        done: whether the episode is over.
        role: who speaks the observation, in the words of the chat template.
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    role: Speaker = "user"


class Environment(ABC):
    """One episode: made, reset, stepped until it is over, closed.

    Episodes run side by side, each step in a thread: what two of them share must be safe for that, and where rollouts
    run ahead of training, also what they share with the trainer. What a method raises fails its own episode, whose row
    then does not train.
    """

    @abstractmethod
    def reset(self, task: Task) -> None:
        """Sets the episode up. The policy speaks first: what it is asked stands in the prompt."""

    @abstractmethod
    def step(self, action: Action) -> StepResult:
        """Answers one turn of the policy."""

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Frees what the episode holds; called once, after its last step or failure."""


EnvironmentFactory: TypeAlias = Callable[[], Environment]
"""Makes an episode's environment: a class, or ``functools.partial`` of one."""


def environment_seed(base_seed: int, *, rl_step: int, uid: str) -> int:
    """The seed of a group's episodes: a hash, so that it does not depend on ranks or order.

    Returns:
        An integer in [0, 2**63).
    """
    key = f"environment/{base_seed}/{rl_step}/{uid}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
