from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from support.rollout import prompt_batch

from lightning_rlhf.rollout.responses import (
    RolloutCounters,
    SampledResponse,
    check_scored,
    cut_at_stop,
    length_at_stop,
    response_budget,
    to_sequence,
)
from lightning_rlhf.types import Rollouts, RolloutSequence

PIECES = {10: "x", 11: "y", 12: "<", 13: "/a", 14: ">", 15: "z", 16: ">z", 2: ""}


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in ids)


def sampled(ids: list[int], *, reason: str = "length", version: int = 0) -> SampledResponse:
    log_probs = [-0.1 * (place + 1) for place in range(len(ids))]
    return SampledResponse(
        token_ids=ids, log_probs=log_probs, finish_reason=reason, token_versions=[version] * len(ids)
    )


@pytest.mark.parametrize(("prompt_length", "budget"), [(24, 8), (25, 7), (30, 2), (31, 1), (32, 0), (40, 0)])
def test_e03_response_shrinks_to_the_room_left_by_the_prompt(prompt_length: int, budget: int) -> None:
    assert response_budget(prompt_length, max_model_len=32, max_new_tokens=8) == budget


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="no ids"):
        response_budget(0, max_model_len=32, max_new_tokens=8)


def test_e07_ids_and_log_probs_end_at_the_token_that_completes_the_stop_string() -> None:
    response = sampled([10, 11, 12, 13, 14, 15])
    cut = cut_at_stop(response, decode=decode, stop=["</a>"], stop_token_ids=set())
    assert cut.token_ids == [10, 11, 12, 13, 14]
    assert cut.log_probs == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])
    assert decode(cut.token_ids) == "xy</a>"
    assert cut.finish_reason == "stop"


def test_e07_ids_and_log_probs_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ids, 5 log-probs"):
        SampledResponse(token_ids=[10, 11], log_probs=[-0.1] * 5, finish_reason="stop", token_versions=[0, 0])


def test_e07_text_and_ids_agree_when_the_last_token_holds_more_than_the_stop_string() -> None:
    cut = cut_at_stop(sampled([10, 12, 13, 16, 10]), decode=decode, stop=["</a>"], stop_token_ids=set())
    assert cut.token_ids == [10, 12, 13, 16]
    assert decode(cut.token_ids) == "x</a>z"


@pytest.mark.parametrize(
    ("ids", "stop", "stop_ids", "length"),
    [
        ([10, 11, 15], [], {2}, None),
        ([10, 2, 15], [], {2}, 2),
        ([2], [], {2}, 1),
        ([10, 2, 12, 13, 14], ["</a>"], {2}, 2),  # the id comes first
        ([12, 13, 14, 2], ["</a>"], {2}, 3),  # the string comes first
        ([10, 11, 10], ["yx", "xy"], set(), 2),  # the earliest of two
        ([], ["x"], {2}, None),
    ],
)
def test_where_a_response_ends(ids: list[int], stop: list[str], stop_ids: set[int], length: int | None) -> None:
    assert length_at_stop(ids, decode=decode, stop=stop, stop_token_ids=stop_ids) == length


def test_no_stop_leaves_the_response_as_it_is() -> None:
    response = sampled([10, 11])
    assert cut_at_stop(response, decode=decode, stop=["q"], stop_token_ids={2}) is response


def test_unknown_finish_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="'cut'"):
        sampled([10], reason="cut")


def sequence(response: SampledResponse | None, counters: RolloutCounters, *, vocab_size: int = 17) -> RolloutSequence:
    return to_sequence(
        prompt_batch({"a": [10, 11]}),
        0,
        sample_index=3,
        response=response,
        policy_version=7,
        vocab_size=vocab_size,
        decode=decode,
        counters=counters,
    )


def test_row_keeps_what_was_sampled() -> None:
    row = sequence(sampled([12, 2], reason="stop", version=7), RolloutCounters())
    assert (row.uid, row.sample_index, row.policy_version, row.finish_reason) == ("a", 3, 7, "stop")
    assert (row.prompt_token_ids, row.response_token_ids) == ([10, 11], [12, 2])
    assert (row.prompt, row.response, row.metadata) == ("a", "<", {"answer": "A"})
    assert row.token_versions is None  # all of one version


def test_row_names_the_version_of_each_token_where_they_differ() -> None:
    response = SampledResponse(
        token_ids=[10, 11], log_probs=[-1.0, -2.0], finish_reason="length", token_versions=[7, 8]
    )
    assert sequence(response, RolloutCounters()).token_versions == [7, 8]


def test_e03_e09_rows_without_a_response_stay_in_their_place() -> None:
    counters = RolloutCounters()
    rows = [
        sequence(sampled([], reason="abort", version=7), counters),
        sequence(sampled([12, 13, 2], reason="stop", version=7), counters),
        sequence(None, counters),
        sequence(sampled([2], reason="stop", version=7), counters),
    ]
    rollouts = Rollouts.from_sequences(rows)
    assert rollouts.response_lengths.tolist() == [0, 3, 0, 1]
    assert rollouts.finish_reasons == ["abort", "stop", "skipped", "stop"]
    assert rollouts.responses == ["", "</a", "", ""]
    assert rollouts.uids == ["a"] * 4
    assert counters.dropped_samples == 0


def test_e10_sample_with_an_id_that_the_tokenizer_lacks_is_dropped_and_counted() -> None:
    counters = RolloutCounters()
    ids = SampledResponse(token_ids=[4, 6], log_probs=[-1.0, -1.0], finish_reason="length", token_versions=[7, 7])
    row = sequence(ids, counters, vocab_size=5)
    assert (row.response_token_ids, row.log_probs, row.finish_reason) == ([], [], "skipped")
    assert counters == RolloutCounters(dropped_samples=1)


def test_messages_name_the_numbers() -> None:
    with pytest.raises(ValueError, match=re.escape("3 ids, 3 log-probs and 1 token versions")):
        SampledResponse(token_ids=[1, 2, 3], log_probs=[0.0] * 3, finish_reason="stop", token_versions=[0])


def test_the_end_of_a_long_response_is_found_in_few_looks() -> None:
    looks = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal looks
        looks += 1
        return "".join(map(chr, ids))

    ids = list(b"a" * 1000 + b"</a>" + b"b" * 1000)
    assert length_at_stop(ids, decode=decode, stop=["</a>"], stop_token_ids=()) == 1004
    assert looks < 20
    assert length_at_stop(list(b"</a>"), decode=decode, stop=["</a>"], stop_token_ids=()) == 4
    assert length_at_stop(list(b"xb"), decode=decode, stop=["x", "b"], stop_token_ids=()) == 1


def test_a_response_that_the_engine_gave_up_on_is_explained() -> None:
    with pytest.raises(ValueError, match=r"gave up on a response.*guide= .* tokenizer"):
        SampledResponse(token_ids=[], log_probs=[], finish_reason="error", token_versions=[])


@pytest.mark.parametrize(
    ("ids", "temperature", "message"),
    [
        ([[]], 1.0, r"Cannot score 0 ids: this engine takes 1 to 8"),
        ([[1], [1] * 9], 1.0, r"Cannot score 9 ids"),
        ([[1]], 0.0, r"temperature above 0, got 0\.0"),
    ],
)
def test_what_cannot_be_scored_is_refused(ids: list[list[int]], temperature: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_scored(ids, longest=8, temperature=temperature)
    check_scored([[1], [1] * 8], longest=8, temperature=0.5)
