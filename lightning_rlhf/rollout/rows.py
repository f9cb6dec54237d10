"""From what an engine sampled for a prompt to its row of the result."""

from __future__ import annotations

from lightning_rlhf.contracts.rollout import SamplingConfig
from lightning_rlhf.rollout.model_directory import ModelDirectory
from lightning_rlhf.rollout.responses import RolloutCounters, SampledResponse, cut_at_stop, to_sequence
from lightning_rlhf.types import PromptBatch, RolloutSequence


def build_row(
    prompts: PromptBatch,
    prompt_index: int,
    *,
    sample_index: int,
    response: SampledResponse | None,
    sampling: SamplingConfig,
    policy_version: int,
    directory: ModelDirectory,
    counters: RolloutCounters,
) -> RolloutSequence:
    """The row, its response ended where it stops; see `to_sequence`.

    Args:
        prompts: the prompts of the step.
        prompt_index: which of them.
        sample_index: which response of its group.
        response: as sampled; None: there was no room for one.
        sampling: how it was drawn.
        policy_version: version of the weights when the request was made.
        directory: of the model: its tokenizer, and the ids that end a response.
        counters: of the engine.
    """
    if response is not None:
        response = cut_at_stop(
            response, decode=directory.decode, stop=sampling.stop, stop_token_ids=end_ids(directory, sampling)
        )
    return to_sequence(
        prompts,
        prompt_index,
        sample_index=sample_index,
        response=response,
        policy_version=policy_version,
        vocab_size=directory.vocab_size,
        decode=directory.decode,
        counters=counters,
    )


def end_ids(directory: ModelDirectory, sampling: SamplingConfig) -> set[int]:
    """Ids that end a response: the model's own and those asked for."""
    return set(directory.end_token_ids) | set(sampling.stop_token_ids)
