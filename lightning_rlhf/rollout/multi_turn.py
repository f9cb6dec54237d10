"""Episodes of several turns over any rollout engine: those that go on take their next turn together."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_rlhf.contracts.environment import (
    EPISODE_KEY,
    Action,
    EnvironmentFactory,
    StepResult,
    Task,
    environment_seed,
)
from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig
from lightning_rlhf.data.turns import TurnTokens
from lightning_rlhf.rollout import environment_calls
from lightning_rlhf.rollout.episodes import Episode, TurnLimits, check_appended, turns_of
from lightning_rlhf.rollout.responses import SampledResponse
from lightning_rlhf.rollout.timed_calls import CallFailure, TimedCalls
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NAMED_FAILURES = 5
"""How many failed episodes of a batch are described; all are counted."""


@dataclass(kw_only=True)
class EpisodeCounts:
    """What episodes have come to, since the counts were last taken.

    Attributes:
        episodes: finished.
        turns: of the policy, in all of them.
        observation_tokens: of all observations, with what the chat template puts around them.
        failed: episodes whose environment failed.
        most_turns: of one episode.
        rewarded: episodes whose environment gave a reward other than 0.
    """

    episodes: int = 0
    turns: int = 0
    observation_tokens: int = 0
    failed: int = 0
    most_turns: int = 0
    rewarded: int = 0

    def add(self, row: RolloutSequence) -> None:
        """Counts an episode in, by the row that it gave."""
        facts, mask = row.metadata[EPISODE_KEY], row.response_mask or []
        self.episodes += 1
        self.turns += facts["turns"]
        self.observation_tokens += len(mask) - sum(mask)
        self.failed += row.finish_reason == "failed"
        self.most_turns = max(self.most_turns, facts["turns"])
        self.rewarded += facts["reward"] != 0


@dataclass(kw_only=True)
class MultiTurnSampler:
    """Draws episodes where an engine by itself draws responses.

    A row's response holds the policy's turns and, off its ``response_mask``, what was said to it in between. The ids of
    a turn are those that the engine sampled; only what is new is encoded. The request of a turn has a seed of its own,
    from (base seed, rl_step, uid, sample index, turn), so that an episode does not depend on which others run.

    Attributes:
        environment: makes each episode's environment.
        tokenizer: of the model.
        max_model_len: limit on prompt and response together.
        limits: that bound an episode.
        chat_template_kwargs: further variables of the chat template, as for the prompts.
        counts: what episodes have come to.
        calls: of all environments.
    """

    environment: EnvironmentFactory
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    limits: TurnLimits = field(default_factory=TurnLimits)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    counts: EpisodeCounts = field(default_factory=EpisodeCounts)

    def __post_init__(self) -> None:
        """Makes what all batches share."""
        self._tokens = TurnTokens(self.tokenizer, chat_template_kwargs=self.chat_template_kwargs)
        self.calls: TimedCalls[Any] = TimedCalls(seconds=self.limits.step_seconds, workers=self.limits.workers)

    def generate(
        self, engine: RolloutEngine, prompts: PromptBatch, sampling: SamplingConfig, *, rl_step: int
    ) -> Rollouts:
        """Plays ``sampling.n`` episodes of each prompt, all side by side; see `RolloutEngine.generate`.

        Returns:
            ``len(prompts) * n`` rows in order (prompt, sample index), each with its episode in its metadata.

        Raises:
            ValueError: if a prompt's metadata has an entry ``episode`` already.
            EnvironmentBrokenError: if an environment raises it, or too many hang.
        """
        if engine.weight_version is None:
            raise RuntimeError("The rollout engine has no valid weights; a push must come before the first episode.")
        version = engine.weight_version
        episodes = [
            self.episode(prompts, index, sample, sampling, rl_step=rl_step)
            for index in range(len(prompts))
            for sample in range(sampling.n)
        ]
        try:
            self._answer(
                episodes, [functools.partial(environment_calls.begin, self.environment, one) for one in episodes]
            )
            while going_on := [episode for episode in episodes if episode.goes_on]:
                self._play_turn(engine, going_on, sampling, rl_step=rl_step)
        finally:
            self._close(episodes)
        facts = [facts for facts in prompts.metadata for _ in range(sampling.n)]
        rows = [
            episode.to_sequence(metadata=metadata, policy_version=version)
            for episode, metadata in zip(episodes, facts, strict=True)
        ]
        self.count(rows)
        return Rollouts.from_sequences(rows, temperature=sampling.temperature or 1.0)

    def take_counts(self) -> EpisodeCounts:
        """The counts so far, which begin anew."""
        taken, self.counts = self.counts, EpisodeCounts()
        return taken

    def episode(
        self, prompts: PromptBatch, index: int, sample: int, sampling: SamplingConfig, *, rl_step: int
    ) -> Episode:
        """A prompt's episode before its environment is made.

        Raises:
            ValueError: if the prompt's metadata has an entry ``episode`` already.
        """
        if EPISODE_KEY in prompts.metadata[index]:
            raise ValueError(f"The prompts' metadata has an entry {EPISODE_KEY!r}, which the episode needs: rename it.")
        uid = prompts.uids[index]
        return Episode(
            task=Task(
                uid=uid,
                sample_index=sample,
                prompt=prompts.prompts[index],
                metadata=dict(prompts.metadata[index]),
                seed=environment_seed(sampling.seed, rl_step=rl_step, uid=uid),
            ),
            prompt_ids=list(prompts.prompt_token_ids[index]),
            limits=self.limits,
            max_model_len=self.max_model_len,
        )

    def _play_turn(
        self, engine: RolloutEngine, going_on: Sequence[Episode], sampling: SamplingConfig, *, rl_step: int
    ) -> None:
        """One turn of every episode that goes on, and what their environments say to it."""
        budgets = [min(sampling.max_new_tokens, episode.room) for episode in going_on]
        for episode, budget in zip(going_on, budgets, strict=True):
            if budget < 1:  # before the first turn; later ones are checked for room
                episode.skip()
        asked = [(episode, budget) for episode, budget in zip(going_on, budgets, strict=True) if budget > 0]
        if not asked:
            return
        answered: list[Episode] = []
        actions: list[Action] = []
        responses = self._sample(engine, [one for one, _ in asked], max(b for _, b in asked), sampling, rl_step=rl_step)
        for (episode, budget), response in zip(asked, responses, strict=True):
            if response is None:
                episode.skip()
            elif action := episode.take_turn(response, budget=budget, tokens=self._tokens):
                answered.append(episode)
                actions.append(action)
        calls = [
            functools.partial(environment_calls.step, one, action)
            for one, action in zip(answered, actions, strict=True)
        ]
        results = self._answer(answered, calls)
        for episode, action, result in zip(answered, actions, results, strict=True):
            if isinstance(result, StepResult):
                episode.take_result(action, result, tokens=self._tokens)

    def _sample(
        self, engine: RolloutEngine, episodes: Sequence[Episode], budget: int, sampling: SamplingConfig, *, rl_step: int
    ) -> list[SampledResponse | None]:
        """Each episode's next turn; None where the engine skipped it."""
        batch = turns_of(episodes)
        rows = engine.generate(batch, replace(sampling, n=1, max_new_tokens=budget), rl_step=rl_step)
        if rows.uids != batch.uids:
            raise RuntimeError(f"The rollout engine returned other rows than it was asked for: {rows.uids[:3]}...")
        starts = rows.cu_seqlens.tolist()
        responses: list[SampledResponse | None] = []
        for row, asked in enumerate(batch.prompt_token_ids):
            span = slice(starts[row], starts[row + 1])
            check_appended(asked, rows.tokens[span].tolist(), uid=batch.uids[row])
            new = slice(starts[row] + len(asked), starts[row + 1])
            if rows.finish_reasons[row] == "skipped":
                responses.append(None)
                continue
            if not bool(torch.all(rows.response_mask[new])):
                raise RuntimeError(f"{batch.uids[row]}: the rollout engine masked ids of a single turn.")
            responses.append(
                SampledResponse(
                    token_ids=rows.tokens[new].tolist(),
                    log_probs=rows.rollout_log_probs[new].tolist(),
                    finish_reason=rows.finish_reasons[row],
                    token_versions=rows.token_versions[new].tolist(),
                )
            )
        return responses

    def _answer(self, episodes: Sequence[Episode], calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs one call for each episode; one that fails ends its episode."""
        results = self.calls.run(calls)
        for episode, result in zip(episodes, results, strict=True):
            environment_calls.settle(episode, result)
        return results

    def _close(self, episodes: Sequence[Episode]) -> None:
        open_ones = [one for one in episodes if one.environment is not None]
        calls = [functools.partial(environment_calls.close, one) for one in open_ones]
        for episode, result in zip(open_ones, self.calls.run(calls), strict=True):
            warn_of_close(episode, result)

    def count(self, rows: Sequence[RolloutSequence]) -> None:
        """Counts episodes in, and names those that failed."""
        for row in rows:
            self.counts.add(row)
        failed = [row for row in rows if row.finish_reason == "failed"]
        if failed:
            named = "; ".join(
                f"{one.uid!r} sample {one.sample_index}: {one.metadata[EPISODE_KEY]['failure']}"
                for one in failed[:NAMED_FAILURES]
            )
            logger.warning(
                "%d of %d episodes failed and do not train: %s%s",
                len(failed), len(rows), named, ", ..." if len(failed) > NAMED_FAILURES else "",
            )  # fmt: skip


def warn_of_close(episode: Episode, result: object) -> None:
    """Names an environment that could not be closed; its episode keeps what it has."""
    if isinstance(result, CallFailure):
        logger.warning("Environment of %s: close %s", episode.task.uid, result.reason)
