"""Groups of episodes in the background: each episode takes its turns at its own pace, beside training.

An episode whose turn is sampled, one whose environment thinks and one that is over wait for nothing but themselves.
What is lost with a replica is the turn's request alone, which is sent again: what was said before stays said, and no
environment is asked twice.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from lightning_rlhf.contracts.environment import StepResult
from lightning_rlhf.contracts.rollout import SamplingConfig
from lightning_rlhf.data.turns import TurnTokens
from lightning_rlhf.rollout import environment_calls
from lightning_rlhf.rollout.episodes import Episode, check_appended, turns_of
from lightning_rlhf.rollout.multi_turn import MultiTurnSampler, warn_of_close
from lightning_rlhf.rollout.responses import SampledResponse
from lightning_rlhf.types import PromptBatch, RolloutSequence

T = TypeVar("T")


class BackgroundEngine(Protocol):
    """What of a rollout engine is needed: `ServedRolloutEngine` has it."""

    def start_call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins a coroutine in the engine's own loop."""

    def start_group(
        self, prompts: PromptBatch, index: int, sampling: SamplingConfig, *, rl_step: int, version: int
    ) -> Future[list[RolloutSequence]]:
        """Begins the responses of one prompt."""


class EpisodeGroups:
    """Plays episodes over an engine that samples in the background.

    The episode of a (seed, rl_step, uid, sample index) is that of `MultiTurnSampler.generate`, id by id, as long as the
    weights stay the same.

    Args:
        sampler: environment, limits and calls; the limits on calls hold for what it plays itself, too.
        engine: that samples the turns.
    """

    def __init__(self, sampler: MultiTurnSampler, engine: BackgroundEngine) -> None:
        self._sampler, self._engine = sampler, engine
        # a copy: encoding changes a tokenizer's settings for the moment, and the trainer's thread encodes prompts
        tokenizer = copy.deepcopy(sampler.tokenizer)
        self._tokens = TurnTokens(tokenizer, chat_template_kwargs=sampler.chat_template_kwargs)
        self._under_way: set[asyncio.Task[Any]] = set()

    def start_group(
        self, prompts: PromptBatch, index: int, sampling: SamplingConfig, *, rl_step: int, version: int
    ) -> Future[list[RolloutSequence]]:
        """Begins the ``sampling.n`` episodes of one prompt; see `ServedRolloutEngine.start_group`.

        Cancelling the result ends the episodes, and closes their environments once what these are doing is done.

        Returns:
            The rows by sample index, each with its episode in its metadata. It raises what
            `MultiTurnSampler.generate` does.

        Raises:
            ValueError: if the prompt's metadata has an entry ``episode`` already.
        """
        episodes = [
            self._sampler.episode(prompts, index, sample, sampling, rl_step=rl_step) for sample in range(sampling.n)
        ]

        async def sample(episode: Episode, budget: int) -> RolloutSequence:
            how = replace(sampling, n=1, max_new_tokens=budget)
            rows = self._engine.start_group(turns_of([episode]), 0, how, rl_step=rl_step, version=version)
            (row,) = await asyncio.wrap_future(rows)
            return row

        async def group() -> list[RolloutSequence]:
            await self._play_all([self._play(one, sample, limit=sampling.max_new_tokens) for one in episodes])
            facts = prompts.metadata[index]
            return [one.to_sequence(metadata=facts, policy_version=version) for one in episodes]

        return self._engine.start_call(group())

    def close(self) -> None:
        """Ends all episodes; comes back when their environments are closed, or twice ``step_seconds`` later."""
        self._engine.start_call(self._end_all()).result()

    async def _end_all(self) -> None:
        for task in self._under_way:
            if not task.cancelling():
                task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=2 * self._sampler.limits.step_seconds)

    async def _play_all(self, episodes: list[Coroutine[Any, Any, None]]) -> None:
        """Plays a group's episodes side by side; an error of one ends the others."""
        own = asyncio.current_task()
        assert own is not None
        self._under_way.add(own)
        own.add_done_callback(self._under_way.discard)
        tasks = [asyncio.create_task(episode) for episode in episodes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                if not task.cancelling():
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(
        self, episode: Episode, sample: Callable[[Episode, int], Coroutine[Any, Any, RolloutSequence]], *, limit: int
    ) -> None:
        """One episode, from its reset to its close."""
        try:
            await self._ask(episode, functools.partial(environment_calls.begin, self._sampler.environment, episode))
            while episode.goes_on:
                budget = min(limit, episode.room)
                if budget < 1:  # before the first turn; later ones are checked for room
                    episode.skip()
                else:
                    await self._take(episode, await sample(episode, budget), budget=budget)
        finally:
            await self._close(episode)

    async def _take(self, episode: Episode, row: RolloutSequence, *, budget: int) -> None:
        """Appends a turn, and what the environment says to it."""
        check_appended(episode.ids, row.prompt_token_ids, uid=row.uid)
        if row.finish_reason == "skipped":
            episode.skip()
            return
        response = SampledResponse(
            token_ids=row.response_token_ids,
            log_probs=row.log_probs,
            finish_reason=row.finish_reason,
            token_versions=row.token_versions or [row.policy_version] * len(row.response_token_ids),
        )
        action = episode.take_turn(response, budget=budget, tokens=self._tokens)
        if action is None:
            return
        result = await self._ask(episode, functools.partial(environment_calls.step, episode, action))
        if isinstance(result, StepResult):
            episode.take_result(action, result, tokens=self._tokens)

    async def _ask(self, episode: Episode, call: Callable[[], Any]) -> Any:
        """Runs a call of the environment; a failure ends the episode.

        If the episode is ended meanwhile, this waits for a call that is begun, so that nothing is closed in use.
        """
        job = self._sampler.calls.submit(call)
        result = asyncio.wrap_future(job)
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError:
            job.cancel()
            await asyncio.wait([result])
            if not result.cancelled() and result.exception() is None:
                environment_calls.settle(episode, result.result())
            raise
        environment_calls.settle(episode, result.result())
        return result.result()

    async def _close(self, episode: Episode) -> None:
        if episode.environment is None:
            return
        result = asyncio.wrap_future(self._sampler.calls.submit(functools.partial(environment_calls.close, episode)))
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError:
            await asyncio.wait([result])
            raise
        finally:
            warn_of_close(episode, result.result())
