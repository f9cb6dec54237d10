"""A rollout engine that says what it is told to, and small environments, for tests of episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from lightning_rlhf.contracts.environment import Action, Environment, StepResult, Task
from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence


class ScriptedEngine(RolloutEngine):
    """Each request's ids come from ``say(uid, prompt ids)``; log-prob i is ``-(prompt's length + i) / 100``.

    Attributes:
        asked: of every call, by uid the ids of the prompt.
        budgets: of every call.
    """

    def __init__(self, say: Callable[[str, list[int]], list[int]], *, end: int, versions: Sequence[int] = (7,)) -> None:
        self.weight_version = versions[0]
        self.asked: list[dict[str, list[int]]] = []
        self.budgets: list[int] = []
        self._say, self._end, self._versions = say, end, list(versions)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, rl_step: int) -> Rollouts:
        assert sampling.n == 1
        version = self._versions[min(len(self.asked), len(self._versions) - 1)]
        self.asked.append(dict(zip(prompts.uids, map(list, prompts.prompt_token_ids), strict=True)))
        self.budgets.append(sampling.max_new_tokens)
        rows = []
        for uid, ids in zip(prompts.uids, prompts.prompt_token_ids, strict=True):
            said = self._say(uid, list(ids))
            response = said[: sampling.max_new_tokens]
            reason = "stop" if response and response[-1] == self._end else "length"
            rows.append(
                RolloutSequence(
                    uid=uid,
                    sample_index=0,
                    prompt_token_ids=list(ids),
                    response_token_ids=response,
                    log_probs=[-(len(ids) + i) / 100 for i in range(len(response))],
                    policy_version=version,
                    finish_reason=reason if response else "skipped",
                )
            )
        return Rollouts.from_sequences(rows, temperature=sampling.temperature)

    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        raise NotImplementedError

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise NotImplementedError

    def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        raise NotImplementedError

    def reset_prefix_cache(self) -> None: ...

    def abort(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None: ...

    def release_kv_cache(self) -> None: ...

    def shutdown(self) -> None: ...


class Counting(Environment):
    """Answers turn ``i`` by ``"seen <i>"`` and is over after ``metadata["turns"]``; a turn is worth its text's length.

    Metadata may ask for trouble: ``trouble`` is ``reset``, ``raise``, ``hang`` (0.5 s) or ``nan``, in turn 1.
    """

    def __init__(self) -> None:
        self._task: Task | None = None

    def reset(self, task: Task) -> None:
        self._task = task
        if task.metadata.get("trouble") == "reset":
            raise OSError("no board")

    def step(self, action: Action) -> StepResult:
        assert self._task is not None
        trouble = self._task.metadata.get("trouble") if action.turn == 1 else None
        if trouble == "raise":
            raise KeyError("piece")
        if trouble == "hang":
            time.sleep(0.5)
        reward = float("nan") if trouble == "nan" else float(len(action.text))
        done = action.turn + 1 >= self._task.metadata["turns"]
        return StepResult(observation=f"seen {action.turn}", reward=reward, done=done)


class Dice(Environment):
    """Says a number drawn from the task's seed, three times; a turn is worth the digits in it."""

    def reset(self, task: Task) -> None:
        self._seed = task.seed

    def step(self, action: Action) -> StepResult:
        digits = sum(character.isdigit() for character in action.text)
        return StepResult(
            observation=str(self._seed * (action.turn + 1) % 97),
            reward=digits / max(1, len(action.text)),
            done=action.turn == 2,
        )
