"""One episode's ids as they grow: what the policy sampled, what was said to it, and the limits on both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rlhf.contracts.environment import EPISODE_KEY, Action, Environment, StepResult, Task
from lightning_rlhf.data.turns import TurnTokens
from lightning_rlhf.rollout.responses import SampledResponse
from lightning_rlhf.types import PromptBatch, RolloutSequence


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """What bounds an episode; a turn by itself has ``max_new_tokens`` of the rollout.

    Attributes:
        max_turns: turns of the policy.
        max_response_tokens: tokens behind the prompt, observations included; None: what ``max_model_len`` leaves.
        max_observation_tokens: tokens of one observation, the rest of which is left out; None: all.
        step_seconds: wall time of one ``reset`` or ``step``.
        workers: environments that work side by side.

    Raises:
        ValueError: for a number that cannot be meant.
    """

    max_turns: int = 8
    max_response_tokens: int | None = None
    max_observation_tokens: int | None = None
    step_seconds: float = 30.0
    workers: int = 16

    def __post_init__(self) -> None:
        """Refuses numbers out of range."""
        sizes = (self.max_turns, self.workers, self.max_response_tokens, self.max_observation_tokens)
        if any(size is not None and size < 1 for size in sizes) or not self.step_seconds > 0:
            raise ValueError(f"The limits of turns must be positive, got {self}.")


@dataclass(kw_only=True)
class Episode:
    """What there is of one episode.

    Attributes:
        task: what it is about.
        prompt_ids: of the prompt.
        limits: that bound it.
        max_model_len: limit on prompt and response together.
        environment: once made.
        response_ids: behind the prompt, appended to and never changed.
        sampled: per response id, whether the policy sampled it.
        log_probs: per response id, as the engine reported it; 0 for observations.
        token_versions: per response id, of the weights that sampled it; -1 for observations.
        finish_reason: empty while it goes on; then ``stop`` (the environment ended it), ``length`` (a limit did),
            ``abort``, ``skipped`` or ``failed`` (the environment did).
        turns: that the policy has taken.
        reward: summed over them.
        failure: why it failed.
        transcript: what was said behind the prompt, by whom.
    """

    task: Task
    prompt_ids: list[int]
    limits: TurnLimits
    max_model_len: int
    environment: Environment | None = None
    response_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    turns: int = 0
    reward: float = 0.0
    failure: str | None = None
    transcript: list[dict[str, str]] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether a turn of the policy is next."""
        return not self.finish_reason

    @property
    def ids(self) -> list[int]:
        """Prompt and response so far: what the next turn is sampled behind."""
        return [*self.prompt_ids, *self.response_ids]

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        left = self.max_model_len - len(self.prompt_ids) - len(self.response_ids)
        if self.limits.max_response_tokens is not None:
            left = min(left, self.limits.max_response_tokens - len(self.response_ids))
        return left

    def take_turn(self, response: SampledResponse, *, budget: int, tokens: TurnTokens) -> Action | None:
        """Appends a turn, cut to its budget; returns what the environment is to answer, if anything.

        A response cut behind its first ``budget`` ids is what a request for so many would have given: each id depends
        on those before it and on the request's seed alone.
        """
        if len(response.token_ids) > budget:
            response = response.first(budget, finish_reason="length")
        self.response_ids += response.token_ids
        self.log_probs += response.log_probs
        self.token_versions += response.token_versions
        self.sampled += [True] * len(response.token_ids)
        text = tokens.decode(response.token_ids)
        self.transcript.append({"role": "assistant", "content": text})
        self.turns += 1
        if response.finish_reason == "abort":
            self.finish_reason = "abort"
            return None
        return Action(
            text=text,
            token_ids=list(response.token_ids),
            turn=self.turns - 1,
            truncated=response.finish_reason == "length",
        )

    def take_result(self, action: Action, result: StepResult, *, tokens: TurnTokens) -> None:
        """Adds the reward, and appends the observation if another turn follows and finds room behind it."""
        self.reward += result.reward
        if action.truncated or (not result.done and self.turns >= self.limits.max_turns):
            self.finish_reason = "length"
        elif result.done:
            self.finish_reason = "stop"
        else:
            ids = tokens.between(
                action.token_ids,
                result.observation,
                role=result.role,
                max_observation_tokens=self.limits.max_observation_tokens,
            )
            if len(ids) >= self.room:
                self.finish_reason = "length"
                return
            self.response_ids += ids
            self.log_probs += [0.0] * len(ids)
            self.token_versions += [-1] * len(ids)
            self.sampled += [False] * len(ids)
            self.transcript.append({"role": result.role, "content": result.observation})

    def fail(self, reason: str) -> None:
        """Ends the episode without a verdict: its row does not train."""
        self.finish_reason, self.failure = "failed", reason

    def skip(self) -> None:
        """Ends the episode as if it had not been sampled: no room for a first turn, or an id that cannot be read."""
        self.finish_reason = "skipped"
        self.response_ids, self.sampled, self.log_probs, self.token_versions = [], [], [], []

    def facts(self) -> dict[str, Any]:
        """What rewards and tables read of it; JSON's values alone."""
        return {
            "reward": self.reward,
            "turns": self.turns,
            "failure": self.failure,
            "finish_reason": self.finish_reason,
            "transcript": self.transcript,
        }

    def to_sequence(self, *, metadata: dict[str, Any], policy_version: int) -> RolloutSequence:
        """The row. Its ``response`` is the policy's last turn: what was said to it is nothing that it wrote."""
        turns = [message["content"] for message in self.transcript if message["role"] == "assistant"]
        return RolloutSequence(
            uid=self.task.uid,
            sample_index=self.task.sample_index,
            prompt_token_ids=list(self.prompt_ids),
            response_token_ids=self.response_ids,
            log_probs=self.log_probs,
            policy_version=policy_version,
            finish_reason=self.finish_reason,
            prompt=self.task.prompt,
            response=turns[-1] if turns and self.finish_reason != "skipped" else "",
            metadata={**metadata, EPISODE_KEY: self.facts()},
            response_mask=self.sampled,
            token_versions=self.token_versions,
        )


def turn_uid(uid: str, *, sample_index: int, turn: int) -> str:
    """The uid of one turn's request: from it and the run's seed comes its own, whatever the layout."""
    return f"turn {turn} of {sample_index}/{uid}"


def turns_of(episodes: Sequence[Episode]) -> PromptBatch:
    """What a rollout engine is asked for, so that each of these episodes takes its next turn."""
    return PromptBatch(
        uids=[turn_uid(e.task.uid, sample_index=e.task.sample_index, turn=e.turns) for e in episodes],
        prompt_token_ids=[episode.ids for episode in episodes],
        prompts=[""] * len(episodes),
        metadata=[{} for _ in episodes],
    )


def check_appended(asked: Sequence[int], returned: Sequence[int], *, uid: str) -> None:
    """Makes sure that the engine sampled behind the ids that it was given.

    Raises:
        RuntimeError: if the row that it returned does not begin with them.
    """
    if list(returned[: len(asked)]) != list(asked):
        place = next((i for i, (a, b) in enumerate(zip(asked, returned, strict=False)) if a != b), len(returned))
        raise RuntimeError(
            f"{uid}: the rollout engine was given {len(asked)} ids, but its row differs from them at place {place}. "
            "Turns are appended to what was sampled before; an engine must return the prompt as it got it."
        )
