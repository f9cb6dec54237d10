"""Megatron's config from Hugging Face's: what must hold whatever the family, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.megatron import FAMILIES, tiny

from lightning_rlhf.engines.megatron.backend import choose_backend
from lightning_rlhf.engines.megatron.config import MoEOptions, transformer_config
from lightning_rlhf.engines.megatron.layout import MegatronLayout


def config(family: str = "qwen3", layout: MegatronLayout | None = None, **options: Any) -> Any:
    options = {"compute_dtype": torch.float32, **options}
    return transformer_config(
        tiny(family).config, layout=layout or MegatronLayout(), backend=choose_backend("cpu"), **options
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_every_family_has(family: str) -> None:
    found = config(family)
    assert found.variable_seq_lengths, "packed micro-batches differ in length"
    assert found.calculate_per_token_loss, "the number of ranks and micro-batches must not change a loss"
    assert found.perform_initialization, "it marks which parameters are cut"
    assert (found.hidden_dropout, found.attention_dropout) == (0.0, 0.0)
    assert not found.deallocate_pipeline_outputs, "silently wrong over gloo"


def test_interleaved_stages_exchange_overlapped() -> None:
    plain = config(layout=MegatronLayout(pipeline_parallel_size=2))
    interleaved = config(layout=MegatronLayout(pipeline_parallel_size=2, virtual_pipeline_size=2))
    assert (plain.overlap_p2p_comm, plain.batch_p2p_comm) == (False, True)
    assert (interleaved.overlap_p2p_comm, interleaved.batch_p2p_comm) == (True, False)
    assert interleaved.virtual_pipeline_model_parallel_size == 2


def test_bf16_keeps_routers_exact() -> None:
    found = config("qwen3_moe", compute_dtype=torch.bfloat16)
    assert (found.params_dtype, found.bf16, found.moe_router_dtype) == (torch.bfloat16, True, "fp32")


def test_the_mean_of_squared_logits_is_of_all_ranks_that_share_a_micro_batch() -> None:
    """Megatron divides it by their number; the balancing loss is scaled by ``real_token_router``."""
    layout = MegatronLayout(tensor_parallel_size=2, sequence_parallel=True, context_parallel_size=2)
    found = config("qwen3_moe", layout, moe=MoEOptions(aux_loss_coef=0.5, z_loss_coef=0.25))
    assert (found.moe_aux_loss_coeff, found.moe_z_loss_coeff) == (0.5, 1.0)


def test_no_losses_of_routers_by_default() -> None:
    found = config("qwen3_moe")
    assert (found.moe_router_load_balancing_type, found.moe_aux_loss_coeff, found.moe_z_loss_coeff) == ("none", 0, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router_replay": "rollout"}, "is blocked: vLLM 0.32 .* requires Triton"),
        ({"router_replay": "r2"}, r"one of \('off', 'old'\), got 'r2'"),
        ({"dispatcher": "flex"}, r"one of \('alltoall', 'allgather'\), got 'flex'"),
    ],
)
def test_options_of_experts_that_there_are_not(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEOptions(**options)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 or torch.bfloat16, got torch.float16"):
        config(compute_dtype=torch.float16)
    with pytest.raises(ValueError, match="recompute must be 'none', 'selective' or 'full', got 'some'"):
        config(recompute="some")
