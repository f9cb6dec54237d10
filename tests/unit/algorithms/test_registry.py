from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_rlhf.algorithms import advantages, corrections, losses, registry
from lightning_rlhf.types import LossOutput


@pytest.fixture(autouse=True)
def _leaves_the_tables_alone() -> Iterator[None]:
    tables = (registry._ADVANTAGES, registry._POLICY_LOSSES)
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def test_names_are_those_of_the_functions() -> None:
    for name, estimator in registry._ADVANTAGES.items():
        assert estimator is getattr(advantages, name)
    for name, loss in registry._POLICY_LOSSES.items():
        assert loss is getattr(losses, name)
    for name, correction in registry._CORRECTIONS.items():
        assert correction is getattr(corrections, name)


def test_every_loss_and_estimator_is_known() -> None:
    not_estimators = {"gae", "whiten", "response_advantages", "token_level_rewards"}
    assert set(advantages.__all__) - not_estimators == set(registry._ADVANTAGES)
    assert set(losses.__all__) - {"value_loss"} == set(registry._POLICY_LOSSES)


def test_a_registered_part_is_found_by_its_name() -> None:
    @registry.register_advantage("raw")
    def raw(rewards: Tensor, uids: list[str]) -> Tensor:
        return rewards

    @registry.register_policy_loss("nothing")
    def nothing(
        log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None
    ) -> LossOutput:
        return LossOutput(terms=torch.zeros_like(log_probs), metrics={})

    assert registry.advantage_estimator("raw") is raw
    assert registry.policy_loss("nothing") is nothing


def test_a_name_is_not_taken_twice_but_a_reload_may_repeat_itself() -> None:
    with pytest.raises(ValueError, match=r"advantage estimator 'grpo' already: lightning_rlhf\.algorithms\.advantages"):
        registry.register_advantage("grpo")(advantages.rloo)
    assert registry.register_advantage("grpo")(advantages.grpo) is advantages.grpo


def test_a_callable_is_taken_as_it_is() -> None:
    assert registry.policy_loss(losses.gspo) is losses.gspo
    assert registry.rollout_correction(corrections.veto) is corrections.veto
    assert registry.rollout_correction("none") is None


def test_unknown_names_fail_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="advantage='gpro' is not one of gdpo, gpg, grpo, maxrl, opo, pass_at_k, reinf"
    ):
        registry.advantage_estimator("gpro")
    with pytest.raises(
        ValueError, match="policy_loss='ppo' is not one of cispo, clip_cov, dapo, dppo_kl, dppo_tv, gmpo"
    ):
        registry.policy_loss("ppo")
    with pytest.raises(
        ValueError, match="'tis' is not one of geometric_mask, icepop, none, sequence_mask, sequence_tis"
    ):
        registry.rollout_correction("tis")
    with pytest.raises(ValueError, match="must be a name or a callable, got 3"):
        registry.policy_loss(3)  # type: ignore[arg-type]
