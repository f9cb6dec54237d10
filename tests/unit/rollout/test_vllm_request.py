from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_rlhf.contracts.rollout import Guide, SamplingConfig
from lightning_rlhf.rollout.vllm_request import VLLMRequest, sampling_arguments


@dataclass
class Logprob:
    logprob: float
    rank: int = 1


@dataclass
class Completion:
    """The fields of vLLM's ``CompletionOutput`` that a request reads."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None


@dataclass
class Output:
    """The fields of vLLM's ``RequestOutput``."""

    outputs: list[Completion]
    finished: bool = False
    prompt_logprobs: list[Any] | None = None
    request_id: str = field(default="request-0")


def request(prompt: list[int] | None = None) -> VLLMRequest:
    return VLLMRequest(request_id="request-0", prompt=prompt or [7], params=None)


def scores(*pairs: tuple[int, float]) -> list[dict[int, Logprob]]:
    return [{token: Logprob(value), 99: Logprob(-0.01)} for token, value in pairs]


def test_collects_deltas_with_the_version_that_sampled_them() -> None:
    one = request()
    assert not one.take(Output([Completion([10], scores((10, -0.5)))]), version=3)
    assert not one.take(Output([Completion([], None)]), version=3)
    assert one.take(Output([Completion([11, 2], scores((11, -0.25), (2, -1.0)), "stop")], finished=True), version=4)
    response = one.response()
    assert response.token_ids == [10, 11, 2]
    assert response.log_probs == [-0.5, -0.25, -1.0]
    assert response.token_versions == [3, 4, 4]
    assert response.finish_reason == "stop"


def test_e05_ids_are_those_sampled() -> None:
    one = request()
    one.take(Output([Completion([0, 1], scores((0, -0.1), (1, -0.2)), "length")], finished=True), version=0)
    assert (one.response().token_ids, one.response().log_probs) == ([0, 1], [-0.1, -0.2])


def test_e07_other_number_of_log_probs_than_ids_is_refused() -> None:
    five = scores(*[(token, -0.1) for token in range(10, 15)])
    with pytest.raises(ValueError, match="2 ids and 5 log-probs"):
        request().take(Output([Completion([10, 11], five)]), version=0)


def test_e07_ids_without_log_probs_are_refused() -> None:
    one = request()
    one.take(Output([Completion([10], None, "length")], finished=True), version=0)
    with pytest.raises(ValueError, match="1 ids, 0 log-probs"):
        one.response()


def test_e09_no_output_at_all_is_an_error_that_says_so() -> None:
    with pytest.raises(RuntimeError, match="no output for request-0"):
        request().take(Output([]), version=0)


def test_response_that_was_not_finished_was_aborted() -> None:
    one = request()
    one.take(Output([Completion([10], scores((10, -0.5)))]), version=0)
    assert one.response().finish_reason == "abort"


def test_prompt_log_probs_are_those_of_the_prompts_ids() -> None:
    one = request([7, 8, 9])
    prompt_scores = [None, *scores((8, -0.5), (9, -1.5))]
    assert one.take(Output([Completion([3], None, "length")], True, prompt_scores), version=0)
    assert one.prompt_log_probs() == [0.0, -0.5, -1.5]


def test_prompt_that_was_not_scored_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="did not score all 1 ids"):
        request().prompt_log_probs()


def test_a_guide_becomes_one_argument_of_plain_values() -> None:
    def guided(guide: Guide | None) -> dict[str, Any]:
        sampling = SamplingConfig(guide=guide)
        return json.loads(json.dumps(sampling_arguments(sampling, seed=1, budget=4, end_token_ids=[1])))

    assert "structured_outputs" not in guided(None)
    assert guided(Guide(regex="a+"))["structured_outputs"] == {"regex": "a+"}
    assert guided(Guide(choice=("yes", "no")))["structured_outputs"] == {"choice": ["yes", "no"]}
    assert guided(Guide(json_schema={"type": "integer"}))["structured_outputs"] == {"json": {"type": "integer"}}


@pytest.mark.parametrize("wrong", [{}, {"regex": "a", "choice": ("b",)}, {"choice": "yes"}, {"choice": ()}])
def test_a_guide_is_one_of_three(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one of regex, json_schema and choice"):
        Guide(**wrong)
