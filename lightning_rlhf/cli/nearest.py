"""Finds the key that a misspelt or misplaced one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "beta": "kl_coef",
    "kl_loss_coef": "kl_coef",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "num_iterations": "num_epochs",
    "ppo_epochs": "num_epochs",
    "ppo_mini_batch_size": "mini_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "train_batch_size": "prompts_per_step",
    "batch_size": "prompts_per_step",
    "num_generations": "num_rollouts",
    "max_completion_length": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "max_steps": "max_rl_steps",
    "total_training_steps": "max_rl_steps",
    "model_name_or_path": "model.path",
}
"""What TRL, verl and transformers call an argument, and the end of the key that it has here."""


def similarity(key: str, candidate: str) -> float:
    """How likely ``candidate`` is what the writer of ``key`` meant, from 0 to 1.

    The last part of a dotted key says most: a right name at the wrong level scores at least 0.7.
    """
    leaf = _ratio(key.rpartition(".")[2], candidate.rpartition(".")[2])
    return 0.7 * leaf + 0.3 * _ratio(key, candidate)


def nearest(key: str, candidates: Iterable[str]) -> str | None:
    """The candidate by the name that other libraries have for it, else the most similar; None if none is near."""
    candidates = list(candidates)
    if known := ELSEWHERE.get(key.rpartition(".")[2]):
        for candidate in candidates:
            if f".{candidate}".endswith(f".{known}"):
                return candidate
    score, best = max(((similarity(key, candidate), candidate) for candidate in candidates), default=(0.0, ""))
    return best if score >= 0.6 else None


def nearest_name(name: str, names: Iterable[str], *, at_least: float = 0.6) -> str | None:
    """The most similar of some undotted names, or None if none is as similar as ``at_least``."""
    score, best = max(((_ratio(name, candidate), candidate) for candidate in names), default=(0.0, ""))
    return best if score >= at_least else None


def did_you_mean(key: str, candidates: Iterable[str]) -> str:
    """The sentence for a message about an unknown key: the nearest valid key, or those of the same level."""
    candidates = list(candidates)
    best = nearest(key, candidates)
    if best is not None:
        return f"did you mean {best}?"
    level = key.rpartition(".")[0]
    siblings = sorted(c for c in candidates if c.rpartition(".")[0] == level) or sorted(
        {c.partition(".")[0] for c in candidates}
    )
    return f"known there: {', '.join(siblings)}."


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()
