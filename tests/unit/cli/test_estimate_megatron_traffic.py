"""Traffic under megatron by hand: a model of two layers, one axis at a time."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.cli.estimate import ModelShape
from lightning_rlhf.cli.estimate_megatron_traffic import activation_traffic, gradient_traffic, push_traffic
from lightning_rlhf.engines.megatron.layout import MegatronLayout

DENSE = ModelShape(
    num_parameters=2 * 1000 + 1280, layer_parameters=1000, num_layers=2, hidden_size=64, mlp_width=128, num_heads=4,
    num_kv_heads=2, head_dim=16, vocab_size=20,
)  # fmt: skip
EXPERTS = ModelShape(
    num_parameters=2 * 1000 + 1280, layer_parameters=1000, num_layers=2, hidden_size=64, mlp_width=64, num_heads=4,
    num_kv_heads=2, head_dim=16, vocab_size=20, expert_parameters=800, experts_per_token=2,
)  # fmt: skip
STATE = 64 * 2
"""Bytes of a token's hidden state in bf16."""


def _activations(layout: dict[str, Any], *, shape: ModelShape = DENSE, **changes: Any) -> dict[str, int]:
    given = {"compute_bytes": 2, "trained": 100, "inferred": 40, "recomputes": False, **changes}
    return activation_traffic(shape, MegatronLayout(**layout), **given)


def test_one_rank_receives_nothing() -> None:
    assert set(_activations({}).values()) == {0}
    for distributed in (False, True):
        assert (
            gradient_traffic(
                DENSE, MegatronLayout(), data_parallel=1, distributed_optimizer=distributed, compute_bytes=2
            )
            == 0
        )
    assert push_traffic(DENSE, MegatronLayout(), compute_bytes=2) == 0


@pytest.mark.parametrize(
    ("settings", "state_passes"),
    [
        # an all-reduce of S over 2 ranks brings 2 S / 2: two of them each layer and pass
        ({}, 2 * (100 + 100 + 40)),
        # the forward once more
        ({"recomputes": True}, 2 * (100 + 100 + 100 + 40)),
    ],
)
def test_tensor_parallelism(settings: dict[str, Any], state_passes: int) -> None:
    found = _activations({"tensor_parallel_size": 2}, **settings)
    assert found == {"tensor": 2 * state_passes * STATE, "context": 0, "expert": 0, "pipeline": 0}


def test_sequence_parallelism_gathers_both_inputs_again() -> None:
    plain = _activations({"tensor_parallel_size": 2})["tensor"]
    found = _activations({"tensor_parallel_size": 2, "sequence_parallel": True})["tensor"]
    assert found == plain + 2 * 2 * 100 * STATE // 2


def test_context_parallelism_sends_keys_and_values_round() -> None:
    """Of 50 and 20 own tokens: bf16 in both forwards and the backward, and fp32 gradients two steps around."""
    keys_values = 2 * 2 * 16
    found = _activations({"context_parallel_size": 2})
    assert found["context"] == 2 * keys_values * (2 * (50 + 20 + 50) + 2 * 4 * 50)
    assert found["tensor"] == found["expert"] == found["pipeline"] == 0


def test_a_stage_gets_states_from_one_side_and_gradients_from_the_other() -> None:
    assert _activations({"pipeline_parallel_size": 2})["pipeline"] == (100 + 40) * STATE


def test_experts_get_a_token_and_send_it_back() -> None:
    """Twice for each of two experts, forward, backward and inference; half of all stays on the rank."""
    found = _activations({"expert_parallel_size": 2}, shape=EXPERTS)
    assert found["expert"] == 2 * STATE * 2 * 2 * (100 + 100 + 40) // 2
    assert _activations({"expert_parallel_size": 2})["expert"] == 0


def test_gradients_of_replicas() -> None:
    """3280 parameters over 4 copies: 3/4 of the fp32 sums twice, or once with 3/4 of the new bf16 parameters."""
    summed, scattered = (
        gradient_traffic(DENSE, MegatronLayout(), data_parallel=4, distributed_optimizer=distributed, compute_bytes=2)
        for distributed in (False, True)
    )
    assert summed == 8 * 3280 * 3 // 4
    assert scattered == 6 * 3280 * 3 // 4


def test_experts_are_summed_over_those_that_hold_the_same() -> None:
    """Of 4 copies with experts over 2 ranks two hold the same: 1680 dense ones over 4, 800 of 1600 over 2."""
    found = gradient_traffic(
        EXPERTS,
        MegatronLayout(expert_parallel_size=2),
        data_parallel=4,
        distributed_optimizer=False,
        compute_bytes=4,
    )
    assert found == 8 * (1680 * 3 // 4 + 800 // 2)


def test_a_push_brings_what_a_rank_lacks() -> None:
    assert push_traffic(DENSE, MegatronLayout(tensor_parallel_size=2), compute_bytes=2) == 2 * 3280 // 2
