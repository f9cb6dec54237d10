"""Tokens of each expert, counted once whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.megatron import build, forward_backward, reference
from torch import Tensor

from lightning_rlhf.engines.megatron.backend import choose_backend
from lightning_rlhf.engines.megatron.expert_load import ExpertLoad, imbalance
from lightning_rlhf.engines.megatron.layout import MegatronLayout


def counted(layout: MegatronLayout, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    with choose_backend("cpu").active():
        chunks = build("qwen3_moe_mixed", layout, **options)
        for chunk in chunks:
            chunk.train()
        load = ExpertLoad(chunks)
        forward_backward(chunks, layout)
        return load.read(), load.read()


LAYOUTS = {
    "tp2_ep2": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}, {}),
    "cp2_pp2": (4, {"context_parallel_size": 2, "pipeline_parallel_size": 2}, {}),
    "dp2_recomputed": (2, {"expert_parallel_size": 2}, {"recompute": "full"}),
}


@pytest.mark.parametrize(("ranks", "sizes", "options"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_token_is_counted_once(ranks: int, sizes: dict[str, Any], options: dict[str, Any]) -> None:
    reference("qwen3_moe_mixed")
    ((expected, _),) = run_distributed(counted, 1, MegatronLayout(), {})
    # four micro-batches of 32 tokens, two experts each; the second layer is dense
    assert expected.sum(1).tolist() == [256.0, 0.0, 256.0, 256.0]
    for found, again in run_distributed(counted, ranks, MegatronLayout(**sizes), options):
        assert torch.equal(found, expected)
        assert again.sum() == 0


def test_imbalance_by_hand() -> None:
    even, skewed, dense = [2.0, 2.0, 2.0, 2.0], [8.0, 0.0, 0.0, 0.0], [0.0] * 4
    assert imbalance(torch.tensor([even, dense])) == (1.0, 0.0)
    assert imbalance(torch.tensor([even, skewed])) == (2.5, 0.375)
    assert imbalance(torch.tensor([dense])) == (0.0, 0.0)


def no_experts() -> None:
    with choose_backend("cpu").active(), pytest.raises(ValueError, match="has none"):
        ExpertLoad(build("qwen3", MegatronLayout()))


def test_a_dense_model_has_none() -> None:
    reference("qwen3")
    run_distributed(no_experts, 1)
