"""ReMax's baseline: the reward of one greedy rollout of each prompt."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_rlhf.types import PromptBatch, Rollouts


def add_baselines(
    batch: PromptBatch,
    sample_greedily: Callable[[PromptBatch], Rollouts],
    score: Callable[[Rollouts], Tensor],
    *,
    stand_by: Callable[[], None] = lambda: None,
) -> None:
    """Samples and scores one greedy rollout of each prompt; its reward becomes its group's ``baseline_rewards``.

    The greedy rollouts do not train. Collective over a model-parallel group, as ``sample_greedily`` is.

    Args:
        batch: prompts with their rollouts; may hold none on some ranks.
        sample_greedily: gives one rollout of each prompt.
        score: gives ``[B]`` rewards of rollouts, NaN where one failed.
        stand_by: called where the batch holds no prompts; other ranks may sample with this one's help.
    """
    if batch.rollouts is None:
        raise RuntimeError("Greedy baselines are joined to rollouts by prompt, but the batch holds no rollouts.")
    of_prompt: dict[str, float] = {}
    if len(batch):
        greedy = sample_greedily(batch)
        of_prompt = dict(zip(greedy.uids, score(greedy).tolist(), strict=True))
    else:
        stand_by()
    rollouts = batch.rollouts
    rollouts.baseline_rewards = rollouts.rollout_log_probs.new_tensor([of_prompt[uid] for uid in rollouts.uids])
