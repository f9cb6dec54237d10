"""Carriers: built once, validated once, cut and joined without losing a field."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_rlhf.batching.packing import flat_to_padded
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence


def _sequence(uid: str, index: int, ids: list[int], **changes: object) -> RolloutSequence:
    fields: dict[str, object] = {
        "uid": uid,
        "sample_index": index,
        "prompt_token_ids": [1, 2],
        "response_token_ids": ids,
        "log_probs": [-0.5 - token for token in ids],
        "policy_version": 3,
        "finish_reason": "stop",
        "metadata": {"row": f"{uid}{index}"},
    }
    return RolloutSequence(**{**fields, **changes})  # type: ignore[arg-type]


def _rollouts() -> Rollouts:
    return Rollouts.from_sequences([_sequence("a", 0, [7, 8, 9]), _sequence("a", 1, []), _sequence("b", 0, [4])])


def test_values_sit_at_the_token_that_they_describe() -> None:
    rollouts = _rollouts()
    assert rollouts.tokens.tolist() == [1, 2, 7, 8, 9, 1, 2, 1, 2, 4]
    assert rollouts.cu_seqlens.tolist() == [0, 5, 7, 10]
    assert rollouts.response_mask.tolist() == [False, False, True, True, True, False, False, False, False, True]
    assert rollouts.rollout_log_probs.tolist() == [0, 0, -7.5, -8.5, -9.5, 0, 0, 0, 0, -4.5]
    assert rollouts.token_versions.tolist() == [-1, -1, 3, 3, 3, -1, -1, -1, -1, 3]
    assert rollouts.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2]
    assert rollouts.sequence_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]


def test_e09_an_empty_answer_keeps_its_row() -> None:
    rollouts = _rollouts()
    assert rollouts.num_sequences == 3
    assert rollouts.response_lengths.tolist() == [3, 0, 1]
    assert rollouts.uids == ["a", "a", "b"]


def test_e09_no_outputs_at_all_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="returned no sequences"):
        Rollouts.from_sequences([])


@pytest.mark.parametrize("field", ["log_probs", "response_mask", "token_versions"])
def test_e05_e07_lengths_that_differ_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"2 response ids but 5 {field}"):
        _sequence("a", 0, [10, 11], **{field: [0] * 5})


def test_e05_ids_are_kept_as_sampled() -> None:
    # ids 0 and 1 would be re-encoded as the single id 2
    rollouts = Rollouts.from_sequences([_sequence("a", 0, [0, 1], log_probs=[-0.1, -0.2], response="ab")])
    assert rollouts.tokens[rollouts.response_mask].tolist() == [0, 1]
    assert rollouts.rollout_log_probs[rollouts.response_mask].tolist() == pytest.approx([-0.1, -0.2])


def test_observation_tokens_are_not_the_policys() -> None:
    rollouts = Rollouts.from_sequences([_sequence("a", 0, [5, 6, 7], response_mask=[True, False, True])])
    assert rollouts.response_mask.tolist() == [False, False, True, False, True]
    assert rollouts.rollout_log_probs.tolist() == [0, 0, -5.5, 0, -7.5]
    assert rollouts.token_versions.tolist() == [-1, -1, 3, -1, 3]


def test_select_takes_every_field_of_a_row_along() -> None:
    picked = _rollouts().select([2, 0, 2])
    assert picked.tokens.tolist() == [1, 2, 4, 1, 2, 7, 8, 9, 1, 2, 4]
    assert picked.rollout_log_probs.tolist() == [0, 0, -4.5, 0, 0, -7.5, -8.5, -9.5, 0, 0, -4.5]
    assert [row["row"] for row in picked.metadata] == ["b0", "a0", "b0"]
    empty = _rollouts().select([])
    assert (empty.num_sequences, empty.num_tokens, empty.uids) == (0, 0, [])


def test_cat_is_the_inverse_of_select() -> None:
    rollouts = _rollouts()
    joined = Rollouts.cat([rollouts.select([0]), rollouts.select([]), rollouts.select([1, 2])])
    for spec in dataclasses.fields(Rollouts):
        before, after = getattr(rollouts, spec.name), getattr(joined, spec.name)
        assert before.equal(after) if isinstance(before, torch.Tensor) else before == after, spec.name


def test_cat_refuses_a_field_that_only_some_batches_have() -> None:
    scored = dataclasses.replace(_rollouts(), rewards=torch.zeros(3))
    with pytest.raises(ValueError, match="rewards is set in some"):
        Rollouts.cat([scored, _rollouts()])


@pytest.mark.parametrize(
    ("field", "value"), [("rollout_log_probs", torch.zeros(9)), ("rewards", torch.zeros(3, 1)), ("uids", ["a"])]
)
def test_a_field_of_the_wrong_shape_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(_rollouts(), **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("starts", [[0, 5, 7], [1, 5, 10], [0, 7, 5, 10]])
def test_cu_seqlens_must_count_every_token_once(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        dataclasses.replace(_rollouts(), cu_seqlens=torch.tensor(starts))


def test_a_prompt_batch_forgets_its_rollouts_when_it_moves() -> None:
    batch = PromptBatch(uids=["a"], prompt_token_ids=[[1]], prompts=["x"], metadata=[{}], rollouts=_rollouts())
    moved = batch.to("cpu")
    assert moved is not batch
    assert moved.rollouts is None


def test_repeated_uids_in_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match=r"repeated: \['a'\]"):
        PromptBatch(uids=["a", "a"], prompt_token_ids=[[1], [2]], prompts=["x", "x"], metadata=[{}, {}])


def test_a12_an_eos_that_is_also_the_padding_stays_a_trained_token() -> None:
    """eos = pad = 2: masks come from lengths, so the sampled EOS trains and padding never does."""
    short = _sequence("a", 0, [7, 8, 2], prompt_token_ids=[5, 2, 6])
    long = _sequence("b", 0, [7, 8, 9, 9, 2], prompt_token_ids=[2, 5, 2, 2, 6])
    rollouts = Rollouts.from_sequences([short, long])
    tokens = flat_to_padded(rollouts.tokens, rollouts.cu_seqlens, 2)
    mask = flat_to_padded(rollouts.response_mask, rollouts.cu_seqlens, False)
    assert tokens[0].tolist() == [5, 2, 6, 7, 8, 2, 2, 2, 2, 2]
    assert mask[0].tolist() == [False] * 3 + [True] * 3 + [False] * 4
    assert mask[1].tolist() == [False] * 5 + [True] * 5
