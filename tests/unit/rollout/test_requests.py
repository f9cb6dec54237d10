"""Requests that go on elsewhere, and the account of all of them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.rollout.replica_server import result_line
from lightning_rlhf.rollout.requests import Ledger, PendingRequest
from lightning_rlhf.rollout.vllm_request import VLLMRequest


def request(max_tokens: int = 5) -> PendingRequest:
    return PendingRequest(request_id="r", prompt=[1, 2], params={"max_tokens": max_tokens, "seed": 7})


def line(ids: list[int], reason: str, *, version: int = 3) -> dict[str, Any]:
    spans = [[version, 0, len(ids)]] if ids else []
    log_probs = [-float(i) for i in ids]
    return {"request_id": "r", "token_ids": ids, "log_probs": log_probs, "versions": spans, "finish_reason": reason}


def test_a_request_that_a_replica_ended_goes_on_with_what_it_has() -> None:
    one = request()
    assert one.body() == {
        "request_id": "r",
        "prompt_token_ids": [1, 2],
        "params": {"max_tokens": 5, "seed": 7},
    }
    assert not one.take(line([8, 9], "abort"))
    body = one.body()
    assert body["prompt_token_ids"] == [1, 2, 8, 9]
    assert body["params"]["max_tokens"] == 3
    assert body["params"]["seed"] != 7
    assert body == one.body(), "the rest has one seed, whoever samples it"
    assert not one.take(line([], "abort"))
    assert one.take(line([4, 5, 6], "length", version=4))
    response = one.response()
    assert response.token_ids == [8, 9, 4, 5, 6]
    assert response.log_probs == [-8.0, -9.0, -4.0, -5.0, -6.0]
    assert response.token_versions == [3, 3, 4, 4, 4]
    assert response.finish_reason == "length"
    with pytest.raises(RuntimeError, match="answered twice"):
        one.take(line([1], "stop"))
    ledger = Ledger()
    ledger.accept([one])
    ledger.settle([one])
    assert ledger == Ledger(accepted=1, answered=1, continued=1)


def test_an_abort_of_the_run_is_an_answer_and_so_is_a_full_response() -> None:
    one = request()
    one.final_abort = True
    assert one.take(line([8], "abort"))
    full = request(max_tokens=2)
    assert full.take(line([8, 9], "abort"))


def test_a_request_without_an_answer_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="without an answer"):
        Ledger().settle([request()])


def test_versions_travel_as_spans() -> None:
    done = VLLMRequest(request_id="r", prompt=[1], params=None, token_ids=[5, 6, 7, 8], log_probs=[-0.5] * 4)
    done.token_versions, done.finish_reason = [2, 2, 3, 3], "stop"
    assert result_line(done)["versions"] == [[2, 0, 2], [3, 2, 4]]
    one = request()
    assert one.take(result_line(done))
    assert one.token_versions == [2, 2, 3, 3]


def test_a_response_with_a_guide_begins_anew() -> None:
    one = request()
    one.params["structured_outputs"] = {"regex": "[0-9]+"}
    first = one.body()
    assert not one.take(line([8, 9], "abort"))
    assert one.body() == first
    assert one.take(line([4, 5], "stop", version=4))
    assert one.response().token_ids == [4, 5]
    assert one.response().token_versions == [4, 4]
