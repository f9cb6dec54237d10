"""What is asked of an episode's environment, each in a thread: to begin, to answer a turn, to close."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_rlhf.contracts.environment import Action, Environment, EnvironmentFactory, StepResult
from lightning_rlhf.rollout.episodes import Episode
from lightning_rlhf.rollout.timed_calls import CallFailure


def begin(make: EnvironmentFactory, episode: Episode) -> None:
    """Makes the episode's environment, and resets it.

    Raises:
        TypeError: if ``make`` made something else.
    """
    environment = make()
    if not isinstance(environment, Environment):
        raise TypeError(f"environment= made a {type(environment).__name__}, expected an Environment.")
    episode.environment = environment
    environment.reset(episode.task)


def step(episode: Episode, action: Action) -> StepResult:
    """What the environment says to a turn; its reward is a finite fp32 number.

    Raises:
        TypeError: if it is no `StepResult`, or its observation is no text.
        ValueError: for another reward, or for text that cannot be encoded.
    """
    if episode.environment is None:
        raise RuntimeError("The episode has no environment.")
    result = episode.environment.step(action)
    if not isinstance(result, StepResult):
        raise TypeError(f"step gave a {type(result).__name__}, expected a StepResult.")
    if not isinstance(result.observation, str):
        raise TypeError(f"step gave an observation of {type(result.observation).__name__}, expected text.")
    result.observation.encode()  # halves of surrogate pairs are refused here, where they fail one episode
    return replace(result, reward=_finite(result.reward))


def _finite(reward: float) -> float:
    number = float(reward)
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(f"step gave the reward {reward}, not a finite fp32 number.")
    return number


def close(episode: Episode) -> None:
    """Closes the environment, if there is one, and lets go of it."""
    environment, episode.environment = episode.environment, None
    if environment is not None:
        environment.close()


def settle(episode: Episode, result: object) -> None:
    """Ends the episode whose call failed."""
    if isinstance(result, CallFailure):
        what = f"step of turn {episode.turns - 1}" if episode.turns else "reset"
        episode.fail(f"{what} {'' if result.hangs else 'raised '}{result.reason}")
        if result.hangs:
            episode.environment = None  # it is in use: closing it is left to its thread's end
