"""Padding weighs nothing at routers: losses, expert load and biases are of real tokens, against a naive loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.experience import make_experience, policy_gradient
from support.fork import run_distributed
from support.megatron import VOCAB, tiny
from torch import Tensor

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.megatron import schedule
from lightning_rlhf.engines.megatron.config import MoEOptions
from lightning_rlhf.engines.megatron.engine import MegatronEngine
from lightning_rlhf.engines.megatron.expert_load import imbalance
from lightning_rlhf.engines.megatron.layout import MegatronLayout
from lightning_rlhf.engines.megatron.load import disk_names
from lightning_rlhf.parity.tiny_models import tiny_model

LENGTHS = [5, 31, 9, 17, 3, 13]
"""Odd ones: each gets padding wherever ranks share sequences."""
MODEL = "tiny-qwen3-moe-deep"
AUX, Z = 0.5, 0.1
EXPERTS_PER_TOKEN = 2


def _engine(layout: MegatronLayout, **options: Any) -> MegatronEngine:
    moe = MoEOptions(**{"aux_loss_coef": AUX, "z_loss_coef": Z, **options.pop("moe", {})})
    config = EngineConfig(
        model=options.pop("model", None) or tiny_model(MODEL),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        micro_batch_size=options.pop("micro_batch_size", 2),
    )
    engine = MegatronEngine(config, device=torch.device("cpu"), layout=layout, moe=moe, **options)
    engine.initialize()
    return engine


def _trained(layout: MegatronLayout, options: dict[str, Any]) -> dict[str, Any]:
    """Micro-batches as rows of all, gradients, and the metrics of one backward."""
    engine = _engine(layout, **options)
    mine = list(range(engine.data_parallel_rank, len(LENGTHS), engine.data_parallel_size))
    data = make_experience(LENGTHS).select(mine)
    metrics = engine.forward_backward_batch(data, policy_gradient)
    return {
        "micro_batches": tuple(tuple(mine[row] for row in rows) for rows in engine._plan(data).rows),
        "gradients": {name: gradient.clone() for name, gradient in engine.get_per_tensor_grad()},
        "load": tuple(float(metrics[name].value) for name in ("expert_load_max", "idle_experts")),
    }


def _naive(micro_batches: list[tuple[int, ...]]) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """Gradients and load by transformers, row after row: nothing is padded.

    ``L = sum(terms * weights) + sum_m T_m / T * AUX * E sum_i f_mi P_mi + Z * mean(logsumexp^2)``, summed over layers,
    with ``T_m`` the tokens of micro-batch ``m`` and ``T`` those of all; the mean is over all tokens.
    """
    model, data = tiny_model(MODEL), make_experience(LENGTHS)
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *arguments: seen.append(arguments[-1][0]))
    loss, counts = torch.zeros(()), torch.zeros(len(model.model.layers), model.config.num_experts)
    for rows in micro_batches:
        logits_of_layers: list[list[Tensor]] = [[] for _ in counts]
        for row in rows:
            one = data.select([row])
            seen.clear()
            log_p = model(one.tokens[None]).logits[0, :-1].log_softmax(-1)
            chosen = log_p.gather(1, one.tokens[1:, None]).squeeze(1)
            terms = -chosen * one.advantages[1:] + 0.1 * (log_p.exp() * log_p).sum(-1)
            assert one.loss_weights is not None
            loss = loss + (terms * one.loss_weights[1:]).sum()
            for layer, logits in enumerate(seen):
                logits_of_layers[layer].append(logits)
        for layer, parts in enumerate(logits_of_layers if rows else []):
            logits = torch.cat(parts)
            probs = logits.softmax(-1)
            load = torch.zeros_like(probs).scatter(1, probs.topk(EXPERTS_PER_TOKEN).indices, 1.0).sum(0)
            share = load / load.sum()
            aux = len(load) * (share * probs.mean(0)).sum()
            loss = (
                loss + AUX * aux * len(logits) / sum(LENGTHS) + Z * logits.logsumexp(-1).square().sum() / sum(LENGTHS)
            )
            counts[layer] += load
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return disk_names(model, gradients), imbalance(counts)


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


TP2_EP2: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "sequence_parallel": True,
    "expert_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, {}),
    "tp2_ep2": (2, TP2_EP2, {}),
    "tp2_ep2_pp2_recomputed": (4, {**TP2_EP2, "pipeline_parallel_size": 2}, {"recompute": "full"}),
    "cp2": (2, {"context_parallel_size": 2}, {}),
    # three micro-batches and an empty one, since two stages take turns
    "pp2_vpp2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}, {}),
    # every micro-batch as long as the longest
    "dp2_ep2_allgather": (2, {"expert_parallel_size": 2}, {"moe": {"dispatcher": "allgather"}}),
    "dp2_ep2_pp2_allgather": (
        4,
        {"expert_parallel_size": 2, "pipeline_parallel_size": 2},
        {"moe": {"dispatcher": "allgather"}, "micro_batch_size": 1},
    ),
}


@pytest.mark.parametrize(("ranks", "sizes", "options"), LAYOUTS.values(), ids=LAYOUTS)
def test_losses_and_load_are_of_real_tokens(ranks: int, sizes: dict[str, Any], options: dict[str, Any]) -> None:
    found = run_distributed(_trained, ranks, MegatronLayout(**sizes), options)
    micro_batches = list(dict.fromkeys(part for one in found for part in one["micro_batches"] if part))
    assert sorted(row for part in micro_batches for row in part) == list(range(len(LENGTHS)))
    gradients, load = _naive(micro_batches)
    for one in found:
        assert _apart(one["gradients"], gradients) < 1e-5
        assert one["load"] == pytest.approx(load)


def test_negative_control_routers_that_do_not_know_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_padding_mask", lambda *_: None)
    (one, _) = run_distributed(_trained, 2, MegatronLayout(**TP2_EP2), {})
    gradients, load = _naive(list(one["micro_batches"]))
    assert _apart(one["gradients"], gradients) > 1e-3
    assert one["load"] != pytest.approx(load)


def _moved_biases(layout: MegatronLayout) -> dict[str, Tensor]:
    """By how much one backward over rows of one token moves the biases that experts are chosen with."""
    moe = {"aux_loss_coef": None, "z_loss_coef": 0.0, "expert_bias_update_rate": 0.01}
    engine = _engine(layout, model=tiny("glm4_moe"), moe=moe, micro_batch_size=8)

    def biases() -> dict[str, Tensor]:
        found = engine.get_per_tensor_param()
        return {name: value.clone() for name, value in found if name.endswith("e_score_correction_bias")}

    before = biases()
    engine.forward_backward_batch(make_experience([1] * 7 + [9], vocab_size=VOCAB), policy_gradient)
    return {name: value - before[name] for name, value in biases().items()}


def test_biases_of_experts_move_by_the_load_of_real_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four positions are padding on two context-parallel ranks, all sent to the same experts."""
    (expected,) = run_distributed(_moved_biases, 1, MegatronLayout())
    assert expected
    assert all(float(value.abs().max()) > 0.009 for value in expected.values())
    context_parallel = MegatronLayout(context_parallel_size=2)
    for found in run_distributed(_moved_biases, 2, context_parallel):
        assert _apart(found, expected) == 0.0
    monkeypatch.setattr(schedule, "_padding_mask", lambda *_: None)
    (counted, _) = run_distributed(_moved_biases, 2, context_parallel)
    assert _apart(counted, expected) > 0.009, "negative control"
