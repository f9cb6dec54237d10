from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_rlhf.algorithms import advantages, corrections, losses
from lightning_rlhf.modules.chosen_parts import chosen_advantage, chosen_correction, chosen_policy_loss

REWARDS, UIDS, LENGTHS = torch.tensor([1.0, 0.0, 2.0, 0.0]), ["a", "a", "b", "b"], torch.tensor([1, 3, 2, 2])
NEW, OLD = torch.tensor([-0.5, -1.0, -0.2]), torch.tensor([-0.9, -1.0, -0.4])
ONES, ENDS = torch.ones(3), torch.tensor([0, 2, 3])


def test_lengths_reach_the_estimators_that_take_them() -> None:
    def estimate(name: str) -> Tensor:
        return chosen_advantage(name, normalize_std=True, arguments=None)(REWARDS, UIDS, LENGTHS)

    assert torch.equal(estimate("opo"), advantages.opo(REWARDS, UIDS, lengths=LENGTHS))
    assert estimate("opo").tolist() == [0.75, -0.25, 1.0, -1.0]
    by_token = advantages.reinforce_plus_plus(REWARDS, UIDS, lengths=LENGTHS)
    assert torch.equal(estimate("reinforce_plus_plus"), by_token)
    assert torch.equal(estimate("rloo"), advantages.rloo(REWARDS, UIDS))


def test_normalize_std_and_arguments_reach_the_estimator() -> None:
    plain = chosen_advantage("grpo", normalize_std=False, arguments=None)(REWARDS, UIDS, LENGTHS)
    assert plain.tolist() == [0.5, -0.5, 1.0, -1.0]
    wide = chosen_advantage("grpo", normalize_std=True, arguments={"eps": 1e-4})(REWARDS, UIDS, LENGTHS)
    assert torch.equal(wide, advantages.grpo(REWARDS, UIDS, eps=1e-4))
    own = chosen_advantage(lambda rewards, uids: rewards * 2, normalize_std=True, arguments=None)
    assert torch.equal(own(REWARDS, UIDS, LENGTHS), REWARDS * 2)


def test_each_loss_keeps_its_own_bounds_unless_given() -> None:
    def terms(**bounds: float) -> Tensor:
        given = {"clip_low": None, "clip_high": None, "dual_clip": None, **bounds}
        return chosen_policy_loss("dapo", **given, arguments=None)(NEW, OLD, ONES, ONES.bool(), cu_seqlens=ENDS).terms

    assert terms().tolist() == pytest.approx([-1.28, -1.0, -1.2214028])
    assert terms(clip_high=0.1).tolist() == pytest.approx([-1.1, -1.0, -1.1])


def test_loss_arguments_reach_the_loss() -> None:
    loss = chosen_policy_loss("gspo", clip_low=None, clip_high=None, dual_clip=None, arguments={"level": "token"})
    expected = losses.gspo(NEW, OLD, ONES, ONES.bool(), cu_seqlens=ENDS, level="token")
    assert torch.equal(loss(NEW, OLD, ONES, ONES.bool(), cu_seqlens=ENDS).terms, expected.terms)


def test_a_correction_gets_the_sequences_if_it_asks() -> None:
    for name, ends in (("token_tis", {}), ("sequence_tis", {"cu_seqlens": ENDS})):
        correction = chosen_correction(name, {"cap": 1.3})
        assert correction is not None
        expected = getattr(corrections, name)(NEW, OLD, ONES, cap=1.3, **ends)
        assert torch.equal(correction(NEW, OLD, ONES, cu_seqlens=ENDS), expected)
    assert chosen_correction("none", None) is None


def test_several_corrections_multiply_their_weights() -> None:
    chosen = ["token_tis", "sequence_mask"]
    correction = chosen_correction(chosen, {"token_tis": {"cap": 1.3}, "sequence_mask": {"high": 1.4}})
    assert correction is not None
    weights = correction(NEW, OLD, ONES, cu_seqlens=ENDS)
    # exp(0.4) is above 1.4, so the first sequence is dropped; exp(0.2) stays below both
    assert weights.tolist() == pytest.approx([0.0, 0.0, 1.2214], abs=1e-4)
    alone = chosen_correction([corrections.icepop], None)
    assert alone is not None
    assert torch.equal(alone(NEW, OLD, ONES, cu_seqlens=ENDS), corrections.icepop(NEW, OLD, ONES))


@pytest.mark.parametrize(
    ("chosen", "arguments", "message"),
    [
        ([], None, r"rollout_correction=\[\] must name one or more"),
        (["veto", "veto"], None, "each once"),
        (["veto", "none"], None, "'none' stands alone"),
        (["veto", "token_tis"], {"cap": 2.0}, r"arguments by its name, \{'veto': \{...\}\}"),
        (["veto"], {"veto": 2.0}, "arguments by its name"),
        (["veto", "token_ti"], None, "'token_ti' is not one of"),
        (["token_tis"], {"token_tis": {"low": 2.0}}, "takes no low"),
    ],
)
def test_several_corrections_that_cannot_be_meant_are_refused(
    chosen: list[str], arguments: dict[str, object] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chosen_correction(chosen, arguments)
