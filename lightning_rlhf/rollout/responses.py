"""The rules that every rollout engine shares: room for a response, where it ends, which samples are refused.

Pure functions on Python lists, so that one set of hand-written cases covers all engines.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lightning_rlhf.types import PromptBatch, RolloutSequence

Decode = Callable[[Sequence[int]], str]
"""Text of ids, special tokens left out."""

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(kw_only=True)
class RolloutCounters:
    """What an engine left out since it was built.

    Attributes:
        skipped_prompts: prompts with no room for a response; their rows are ``skipped``.
        dropped_samples: samples with an id that the tokenizer does not have; their rows are ``skipped``, too.
    """

    skipped_prompts: int = 0
    dropped_samples: int = 0


@dataclass(kw_only=True)
class SampledResponse:
    """What came out of an engine for one request.

    Attributes:
        token_ids: ids as sampled.
        log_probs: natural-log probability of each id, in its place.
        finish_reason: ``stop``, ``length`` or ``abort``.
        token_versions: version of the weights that sampled each id.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    token_versions: list[int]

    def __post_init__(self) -> None:
        """Refuses lists of different lengths: ids would meet the wrong log-probs."""
        sizes = (len(self.token_ids), len(self.log_probs), len(self.token_versions))
        if len(set(sizes)) != 1:
            raise ValueError(
                f"The rollout engine returned {sizes[0]} ids, {sizes[1]} log-probs and {sizes[2]} token versions for "
                f"one response; every id needs exactly one of each."
            )
        if self.finish_reason == "error":
            raise ValueError(
                "The rollout engine gave up on a response in the middle. With guide= this means that no token of the "
                "tokenizer continues the form: a choice, say, with letters that it cannot write. Change the guide."
            )
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"Unknown finish reason {self.finish_reason!r}; expected one of {FINISH_REASONS}.")

    def first(self, length: int, *, finish_reason: str) -> SampledResponse:
        """The first ``length`` ids with what belongs to them."""
        return SampledResponse(
            token_ids=self.token_ids[:length],
            log_probs=self.log_probs[:length],
            finish_reason=finish_reason,
            token_versions=self.token_versions[:length],
        )


def response_budget(prompt_length: int, *, max_model_len: int, max_new_tokens: int) -> int:
    """How many tokens a response to a prompt may have; 0 means that the prompt must not be sent.

    Args:
        prompt_length: ids of the prompt.
        max_model_len: the engine's limit on prompt and response together.
        max_new_tokens: the limit that sampling asks for.

    Raises:
        ValueError: if the prompt is empty: there is nothing to condition the first token on.
    """
    if prompt_length < 1:
        raise ValueError("A prompt has no ids; a response needs at least one id (a BOS token, say) to follow.")
    return max(0, min(max_new_tokens, max_model_len - prompt_length))


def check_scored(token_ids: Sequence[Sequence[int]], *, longest: int, temperature: float) -> None:
    """Refuses what cannot be scored.

    Args:
        token_ids: sequences.
        longest: ids that the engine takes in one.
        temperature: at which they are to be scored.

    Raises:
        ValueError: if a sequence is empty or too long, or the temperature is not above 0.
    """
    for ids in token_ids:
        if not 0 < len(ids) <= longest:
            raise ValueError(f"Cannot score {len(ids)} ids: this engine takes 1 to {longest} in one sequence.")
    if not temperature > 0:
        raise ValueError(f"score needs a temperature above 0, got {temperature}.")


def length_at_stop(
    token_ids: Sequence[int], *, decode: Decode, stop: Sequence[str], stop_token_ids: Collection[int]
) -> int | None:
    """How many ids a response keeps: through the first stop id, or the id that completes a stop string.

    Returns:
        The length, or None if nothing ends the response.
    """
    ends = [index + 1 for index, token in enumerate(token_ids) if token in stop_token_ids][:1]
    limit = ends[0] if ends else len(token_ids)
    if stop and _has_stop(decode(token_ids[:limit]), stop):
        # a stop string that the text has stays in it as ids are added, so its last id is found by halving
        return 1 + bisect.bisect_left(
            range(1, limit), True, key=lambda length: _has_stop(decode(token_ids[:length]), stop)
        )
    return ends[0] if ends else None


def _has_stop(text: str, stop: Sequence[str]) -> bool:
    return any(string in text for string in stop)


def cut_at_stop(
    response: SampledResponse, *, decode: Decode, stop: Sequence[str], stop_token_ids: Collection[int]
) -> SampledResponse:
    """Ends ids, log-probs and versions at the same place: the stop is kept, nothing after it is.

    The text of a response is what its ids decode to; when the last id holds more than the end of the stop string, the
    text has it, too, so that text and ids never disagree.
    """
    length = length_at_stop(response.token_ids, decode=decode, stop=stop, stop_token_ids=stop_token_ids)
    return response if length is None else response.first(length, finish_reason="stop")


def to_sequence(
    prompts: PromptBatch,
    prompt_index: int,
    *,
    sample_index: int,
    response: SampledResponse | None,
    policy_version: int,
    vocab_size: int,
    decode: Decode,
    counters: RolloutCounters,
) -> RolloutSequence:
    """One row of the result; a prompt without a request (``response`` None) and a refused sample give an empty row.

    Args:
        prompts: the prompts of the step.
        prompt_index: which of them.
        sample_index: which response of its group.
        response: the sample, cut at its stop.
        policy_version: version of the weights when the request was made.
        vocab_size: ids that the tokenizer has; a model's matrix may have more rows, and such an id cannot be read back.
        decode: text of ids.
        counters: ``dropped_samples`` is counted up here.
    """
    if response is not None and any(not 0 <= token < vocab_size for token in response.token_ids):
        counters.dropped_samples += 1
        response = None
    versions = None
    if response is not None and any(version != policy_version for version in response.token_versions):
        versions = response.token_versions
    return RolloutSequence(
        uid=prompts.uids[prompt_index],
        sample_index=sample_index,
        prompt_token_ids=list(prompts.prompt_token_ids[prompt_index]),
        response_token_ids=response.token_ids if response is not None else [],
        log_probs=response.log_probs if response is not None else [],
        policy_version=policy_version,
        finish_reason=response.finish_reason if response is not None else "skipped",
        prompt=prompts.prompts[prompt_index],
        response=decode(response.token_ids) if response is not None else "",
        metadata=prompts.metadata[prompt_index],
        token_versions=versions,
    )
