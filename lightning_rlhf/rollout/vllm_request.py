"""What one request to vLLM collects from its results. Imports vLLM where a request is built alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_rlhf.contracts.rollout import Guide, SamplingConfig
from lightning_rlhf.rollout.responses import SampledResponse

GUIDE = "structured_outputs"
"""Name of the argument that holds the form that a response must have."""


def sampling_arguments(
    sampling: SamplingConfig, *, seed: int, budget: int, end_token_ids: Collection[int]
) -> dict[str, Any]:
    """vLLM's ``SamplingParams`` by name, for one response; all values are JSON's.

    Args:
        sampling: what the run asks for.
        seed: the request's own seed.
        budget: tokens that the response may have.
        end_token_ids: ids that end it.
    """
    arguments = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": seed,
        "max_tokens": budget,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(end_token_ids),
        "ignore_eos": True,  # EOS is one of the stop ids: one rule for all ends
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }
    if sampling.guide is not None:
        arguments[GUIDE] = _guide_arguments(sampling.guide)
    return arguments


def _guide_arguments(guide: Guide) -> dict[str, Any]:
    """vLLM's ``StructuredOutputsParams`` by name."""
    if guide.regex is not None:
        return {"regex": guide.regex}
    if guide.json_schema is not None:
        return {"json": dict(guide.json_schema)}
    return {"choice": list(guide.choice)}


def build_sampling_params(arguments: Mapping[str, Any]) -> Any:
    """vLLM's ``SamplingParams`` of what `sampling_arguments` gave, each token handed out once.

    Raises:
        TypeError: for a name that vLLM does not have.
        ValueError: for a value that it refuses.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    given = dict(arguments)
    guide = given.pop(GUIDE, None)
    return SamplingParams(
        **given,
        structured_outputs=None if guide is None else StructuredOutputsParams(**guide),
        output_kind=RequestOutputKind.DELTA,
    )


@contextmanager
def refusals_named() -> Iterator[None]:
    """Has what vLLM refuses in a request, such as a guide that is no regular expression, be a ``ValueError``."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except VLLMValidationError as error:
        raise ValueError(f"vLLM refuses the request: {error}") from error


@dataclass(kw_only=True)
class VLLMRequest:
    """A request on its way through vLLM, and what came out so far.

    Attributes:
        request_id: its own in the engine.
        prompt: ids.
        params: vLLM's ``SamplingParams``.
        token_ids: of the response.
        log_probs: of each of them.
        token_versions: of the weights that sampled each of them.
        finish_reason: vLLM's; ``abort`` until it has given one.
        prompt_scores: vLLM's log-probs of the prompt's ids, where they were asked for.
    """

    request_id: str
    prompt: list[int]
    params: Any
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    finish_reason: str = "abort"
    prompt_scores: list[Any] | None = None

    def take(self, output: Any, *, version: int) -> bool:
        """Adds what vLLM's ``RequestOutput`` brings; True when the request is done."""
        if not output.outputs:
            raise RuntimeError(f"vLLM returned no output for {self.request_id}; expected one response to each request.")
        completion = output.outputs[0]
        self.prompt_scores = output.prompt_logprobs or self.prompt_scores
        token_ids, scores = list(completion.token_ids), completion.logprobs
        if scores is not None:
            if len(scores) != len(token_ids):
                raise ValueError(f"vLLM returned {len(token_ids)} ids and {len(scores)} log-probs for one response.")
            self.log_probs += [float(of_id[token].logprob) for token, of_id in zip(token_ids, scores, strict=True)]
        self.token_ids += token_ids
        self.token_versions += [version] * len(token_ids)
        if completion.finish_reason is not None:
            self.finish_reason = completion.finish_reason
        return bool(output.finished)

    def response(self) -> SampledResponse:
        """The response so far; ``abort`` if vLLM has not ended it."""
        return SampledResponse(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=self.finish_reason,
            token_versions=self.token_versions,
        )

    def prompt_log_probs(self) -> list[float]:
        """Log-prob of each prompt id, 0 for the first."""
        if self.prompt_scores is None or len(self.prompt_scores) != len(self.prompt):
            raise RuntimeError(f"vLLM did not score all {len(self.prompt)} ids of {self.request_id}; was it aborted?")
        pairs = zip(self.prompt[1:], self.prompt_scores[1:], strict=True)
        return [0.0, *(float(scores[token].logprob) for token, scores in pairs)]
