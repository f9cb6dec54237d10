"""Losses and biases of routers: what they add does not depend on the layout, nor on how many tokens are trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import megatron
from support.fork import run_distributed
from support.megatron import build, forward_backward, reference, sequences, tiny
from torch import Tensor

from lightning_rlhf.engines.megatron.backend import choose_backend
from lightning_rlhf.engines.megatron.config import MoEOptions
from lightning_rlhf.engines.megatron.export import export_parameters
from lightning_rlhf.engines.megatron.layout import MegatronLayout

AUX = MoEOptions(aux_loss_coef=0.5)
Z = MoEOptions(z_loss_coef=0.1)


def gradients(layout: MegatronLayout, moe: MoEOptions, scale: float = 1.0) -> dict[str, Tensor]:
    """Of the whole batch, the tokens' weights scaled."""
    data = sequences()
    scaled = megatron.Sequences(data.tokens, [[one * scale for one in pack] for pack in data.weights])
    megatron.sequences = lambda: scaled  # this rank's process alone
    with choose_backend("cpu").active():
        chunks = build("qwen3_moe", layout, moe=moe)
        for chunk in chunks:
            chunk.train()
        forward_backward(chunks, layout)
        found = export_parameters(
            chunks, hf_config=tiny("qwen3_moe").config, tensor_of=lambda parameter: parameter.main_grad
        )
        return {name: tensor.clone() for name, tensor in found}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


LAYOUTS = {
    "ep2": (2, {"expert_parallel_size": 2}, "alltoall"),
    "ep2_allgather": (2, {"expert_parallel_size": 2}, "allgather"),
    "tp2": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}, "alltoall"),
    "cp2_pp2": (4, {"context_parallel_size": 2, "pipeline_parallel_size": 2}, "alltoall"),
}


@pytest.mark.slow  # each loss alone; test_padding.py has both, against a naive loop
@pytest.mark.parametrize("options", [AUX, Z], ids=["aux", "z"])
def test_losses_of_routers_are_the_same_in_every_layout(options: MoEOptions) -> None:
    reference("qwen3_moe")
    (expected,) = run_distributed(gradients, 1, MegatronLayout(), options)
    (plain,) = run_distributed(gradients, 1, MegatronLayout(), MoEOptions())
    assert difference(expected, plain) > 1e-3, "the loss must matter"
    for ranks, sizes, dispatcher in LAYOUTS.values():
        moe = MoEOptions(**{**vars(options), "dispatcher": dispatcher})
        for found in run_distributed(gradients, ranks, MegatronLayout(**sizes), moe):
            assert difference(found, expected) < 1e-5, (sizes, dispatcher)


def test_the_gradient_of_the_balance_does_not_depend_on_the_tokens_that_are_trained() -> None:
    reference("qwen3_moe")
    layout = MegatronLayout(expert_parallel_size=2)
    added: list[dict[str, Tensor]] = []
    for scale in (0.0, 1.0, 4.0):
        with_loss, without = (run_distributed(gradients, 2, layout, moe, scale)[0] for moe in (AUX, MoEOptions()))
        added.append({name: with_loss[name] - without[name] for name in with_loss})
    assert max(float(one.abs().max()) for one in added[0].values()) > 1e-3
    assert difference(added[0], added[1]) < 1e-5
    assert difference(added[0], added[2]) < 1e-5


def biases(rate: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Before and after one backward."""
    layout = MegatronLayout(expert_parallel_size=2)
    with choose_backend("cpu").active():
        chunks: list[Any] = build("glm4_moe", layout, moe=MoEOptions(expert_bias_update_rate=rate))

        def read() -> dict[str, Tensor]:
            found = export_parameters(chunks, hf_config=tiny("glm4_moe").config)
            return {name: t.clone() for name, t in found if name.endswith("e_score_correction_bias")}

        before = read()
        forward_backward(chunks, layout)
        return before, read()


def test_expert_biases_stay_unless_asked_to_move() -> None:
    reference("glm4_moe")
    for before, after in run_distributed(biases, 2, 0.0):
        assert len(before) == 3  # the first layer has no experts
        assert all(torch.equal(before[name], after[name]) for name in before)
    for before, after in run_distributed(biases, 2, 0.01):
        moved = torch.cat([after[name] - before[name] for name in before])
        torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.01))
        assert 0 < (moved > 0).sum() < len(moved)
