"""Rewards by the verifiers of reasoning-gym."""

from __future__ import annotations

import difflib
from typing import Any

from lightning_rlhf.rewards.extract import Extraction, extract_answer


class ReasoningGymReward:
    """Scores responses to a reasoning-gym task with the task's own ``score_answer``.

    Verifiers grade: most give 1 for the right answer and, where the right answer stands inside a longer one, the
    share of it that is right (``chain_sum``: "4" within "14" earns 0.5). ``binary`` turns all but a full score to 0.

    Args:
        task: name of the task, for example ``chain_sum``.
        extract: what of the response is the answer; a response without one scores 0, for it is wrong, not unscored.
        binary: reward 1 for a full score and 0 otherwise.
        task_config: settings of the task, where its verifier depends on them.

    Raises:
        ValueError: for an unknown task, with the nearest one.
        ImportError: if reasoning-gym is not installed.
    """

    def __init__(
        self,
        task: str,
        *,
        extract: Extraction = "none",
        binary: bool = False,
        task_config: dict[str, Any] | None = None,
    ) -> None:
        self.task = task
        self.extract: Extraction = extract
        self.binary = binary
        self.task_config = dict(task_config or {})
        extract_answer("", extract)  # an unknown extraction fails here rather than on every row
        self._verifier = _create_verifier(task, self.task_config)

    @property
    def __name__(self) -> str:
        """Under which the reward is reported."""
        return self.task

    def __reduce__(self) -> tuple[Any, ...]:
        # the verifier may hold a generator's state; it is built again from what describes it
        return _rebuild, (self.task, self.extract, self.binary, self.task_config)

    def __call__(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        """Scores each response against ``metadata[i]["entry"]``, the task's entry as reasoning-gym made it.

        Raises:
            KeyError: if a row's metadata has no entry.
        """
        del prompts
        return [self._score(response, facts) for response, facts in zip(responses, metadata, strict=True)]

    def _score(self, response: str, metadata: dict[str, Any]) -> float:
        if "entry" not in metadata:
            raise KeyError(
                f"metadata['entry'] is missing (it has {sorted(metadata)}); the prompts of ReasoningGymReward must "
                "carry the task's entry: question, answer and metadata"
            )
        answer = extract_answer(response, self.extract)
        if answer is None:
            return 0.0
        graded = float(self._verifier.score_answer(answer, metadata["entry"]))
        return float(graded >= 1.0) if self.binary else graded


def _rebuild(task: str, extract: Extraction, binary: bool, task_config: dict[str, Any]) -> ReasoningGymReward:
    return ReasoningGymReward(task, extract=extract, binary=binary, task_config=task_config)


def _create_verifier(task: str, task_config: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("ReasoningGymReward needs reasoning-gym: pip install lightning_rlhf[tasks]") from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"it has {len(DATASETS)} tasks, {', '.join(list(DATASETS)[:5])}..."
        )
        raise ValueError(f"reasoning-gym has no task {task!r}; {hint}")
    return reasoning_gym.create_dataset(task, **task_config)
