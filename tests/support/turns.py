"""A rollout engine that says what it is told to, and small environments, for tests of episodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from lightning_rlhf.contracts.environment import Action, Environment, StepResult, Task
from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence

T = TypeVar("T")


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
        return Rollouts.from_sequences(self.rows(prompts, sampling), temperature=sampling.temperature)

    def rows(self, prompts: PromptBatch, sampling: SamplingConfig) -> list[RolloutSequence]:
        """One call's answers."""
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
        return rows

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


class LoopEngine(ScriptedEngine):
    """The same in a loop of its own, where each request takes as long as ``seconds(uid)`` says."""

    def __init__(self, *arguments: Any, seconds: Callable[[str], float] = lambda uid: 0.0, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._seconds = seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start_call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start_group(
        self, prompts: PromptBatch, index: int, sampling: SamplingConfig, *, rl_step: int, version: int
    ) -> Future[list[RolloutSequence]]:
        async def group() -> list[RolloutSequence]:
            assert len(prompts) == 1
            await asyncio.sleep(self._seconds(prompts.uids[0]))
            return self.rows(prompts, sampling)

        return self.start_call(group())

    def shutdown(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


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


@dataclass
class Account:
    """What happened to all episodes.

    Attributes:
        events: ``(what, uid, sample index, number of the environment)``, in order.
        made: environments.
        at_work: of them in a step now.
        most_at_work: that there were at once.
    """

    events: list[tuple[str, str, int, int]] = field(default_factory=list)
    made: int = 0
    at_work: int = 0
    most_at_work: int = 0

    def check_closed(self) -> None:
        """Every environment that was made has been reset and closed, once, and was not asked for anything after."""
        by_number: dict[int, list[str]] = {}
        for what, _, _, number in self.events:
            by_number.setdefault(number, []).append(what)
        assert sorted(by_number) == list(range(self.made))
        for events in by_number.values():
            assert (events[0], events[-1]) == ("reset", "close"), events
            assert set(events[1:-1]) <= {"step"}

    def count(self, what: str) -> int:
        """How often something happened."""
        return sum(event[0] == what for event in self.events)


class Logged(Environment):
    """Keeps an account. Metadata may say ``turns`` (2 if not) and ``seconds`` of each step."""

    account: ClassVar[Account] = Account()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._own = Logged.account  # a step that is given up may end in another test
        with Logged.lock:
            self._number, self._own.made = self._own.made, self._own.made + 1
        self._steps = 0

    @classmethod
    def forget(cls) -> None:
        """Begins the account anew."""
        Logged.account = Account()

    def _note(self, what: str) -> None:
        with Logged.lock:
            self._own.events.append((what, self._task.uid, self._task.sample_index, self._number))

    def reset(self, task: Task) -> None:
        self._task = task
        self._note("reset")

    def step(self, action: Action) -> StepResult:
        assert action.turn == self._steps, "a turn was answered twice, or left out"
        self._steps += 1
        with Logged.lock:
            self._own.at_work += 1
            self._own.most_at_work = max(self._own.most_at_work, self._own.at_work)
        time.sleep(self._task.metadata.get("seconds", 0.0))
        with Logged.lock:
            self._own.at_work -= 1
        self._note("step")
        digits = sum(character.isdigit() for character in action.text)
        done = action.turn + 1 >= self._task.metadata.get("turns", 2)
        return StepResult(observation=f"seen {action.turn}", reward=digits / max(1, len(action.text)), done=done)

    def close(self) -> None:
        self._note("close")
