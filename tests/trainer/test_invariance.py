"""The same loss, gradients and metrics, however a batch is cut, padded, ordered or dealt to ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.experience import make_experience
from support.fork import run_distributed
from support.tiny import tiny_model
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_ppo, toy_trainer
from torch import Tensor

from lightning_rlhf.algorithms import losses, registry
from lightning_rlhf.algorithms.aggregation import AggregationMode, loss_weights
from lightning_rlhf.algorithms.corrections import sequence_tis
from lightning_rlhf.batching.packing import flat_to_padded
from lightning_rlhf.batching.plan import RowFact, build_step_plan
from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.metrics import compute_metrics
from lightning_rlhf.modules import GRPO
from lightning_rlhf.types import Experience

LENGTHS = [5, 30, 8, 17, 3, 40, 12, 9]
CUTS: dict[str, dict[str, int]] = {
    "1 of 8": {"micro_batch_size": 8},
    "8 of 1": {"micro_batch_size": 1},
    "by 3": {"micro_batch_size": 3},
    "dynamic": {"max_tokens_per_micro_batch": 48},
}
LOSSES = sorted(registry._POLICY_LOSSES)
MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)


def _module(loss: str, mode: AggregationMode, **arguments: Any) -> GRPO:
    return toy_module("nothing-is-loaded", policy_loss=loss, aggregation=mode, norm_length=8, **arguments)


def _engine(**cut: int) -> TorchEngine:
    config = EngineConfig(model=tiny_model(), optimizer=partial(torch.optim.SGD, lr=0.1), **cut)
    engine = TorchEngine(config, device=torch.device("cpu"))
    engine.initialize()
    return engine


def _experience(mode: AggregationMode, *, order: list[int] | None = None) -> Experience:
    """Off-policy rows with a reference, whose old log-probs are the engine's own moved by up to half a nat."""
    data = make_experience(LENGTHS)
    draw = torch.Generator().manual_seed(1)
    now = _engine().infer_batch(data).log_probs
    assert now is not None

    def moved(scale: float) -> Tensor:
        return (now + scale * torch.randn(len(now), generator=draw)).clamp(max=0.0) * data.response_mask

    mask = data.loss_mask & (data.sequence_ids != 3)  # one row does not train
    data = dataclasses.replace(
        data,
        loss_mask=mask,
        old_log_probs=moved(0.5),
        ref_log_probs=moved(0.3),
        rollout_log_probs=moved(0.2),
        selected=(torch.rand(len(now), generator=draw) < 0.3) & mask,
        loss_weights=loss_weights(mask, mode, cu_seqlens=data.cu_seqlens, norm_length=8),
    )
    return data if order is None else data.select(order)


def _measured(module: GRPO, data: Experience, **cut: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    data = data if module._selection else dataclasses.replace(data, selected=None)
    engine = _engine(**cut)
    metrics = compute_metrics(engine.forward_backward_batch(data, module.policy_loss))
    return metrics, {name: p.grad for name, p in engine.causal_lm.named_parameters() if p.grad is not None}


def _same(one: tuple[dict[str, float], dict[str, Tensor]], other: tuple[dict[str, float], dict[str, Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in one[1].values())
    assert largest > 0
    for name, gradient in one[1].items():
        assert torch.allclose(gradient, other[1][name], rtol=1e-4, atol=1e-5 * largest), name


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_change_nothing(loss: str) -> None:
    """Eight of one row, one of eight, three of three, and as many as a token budget asks for."""
    mode = MODES[LOSSES.index(loss) % len(MODES)]
    module = _module(loss, mode, kl_coef=0.1, entropy_coef=0.01, rollout_correction="sequence_tis")
    data = _experience(mode)
    whole = _measured(module, data, **CUTS["1 of 8"])
    for name in ("8 of 1", "by 3", "dynamic"):
        _same(whole, _measured(module, data, **CUTS[name]))


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_rows_changes_nothing(mode: AggregationMode) -> None:
    module = _module("ppo_clip", mode, kl_coef=0.1, entropy_coef=0.01, rollout_correction="sequence_tis")
    whole = _measured(module, _experience(mode))
    _same(whole, _measured(module, _experience(mode, order=[6, 2, 5, 0, 7, 3, 1, 4]), micro_batch_size=3))


def test_a_mean_of_micro_batch_means_would_be_told_apart() -> None:
    """The negative control: each micro-batch divided by its own count gives another loss and other gradients."""
    module, data = _module("ppo_clip", "token-mean"), _experience("token-mean")
    whole = _measured(module, data)
    halves = []
    for rows in ([0, 1, 2, 3], [4, 5, 6, 7]):
        part = data.select(rows)
        weights = loss_weights(part.loss_mask, "token-mean", cu_seqlens=part.cu_seqlens) / 2
        halves.append(_measured(module, dataclasses.replace(part, loss_weights=weights)))
    naive = {name: halves[0][1][name] + halves[1][1][name] for name in whole[1]}
    assert abs(halves[0][0]["loss"] + halves[1][0]["loss"] - whole[0]["loss"]) > 1e-3
    with pytest.raises(AssertionError):
        _same(whole, (whole[0], naive))


def _terms_of(loss: Callable[..., Any], inputs: list[Tensor], mask: Tensor, mode: Any, **layout: Any) -> Any:
    leaf = inputs[0].clone().requires_grad_()
    output = loss(leaf, *inputs[1:3], mask, **layout)
    weights = loss_weights(mask, mode, norm_length=8, **layout)
    correction = sequence_tis(inputs[1], inputs[3], mask, **layout)
    value = (output.terms * weights * correction).sum()
    value.backward()
    assert leaf.grad is not None
    return float(value), leaf.grad[mask], compute_metrics(output.metrics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_packed_and_three_times_padded_give_one_loss(name: str, mode: AggregationMode, dtype: torch.dtype) -> None:
    """Flat, padded to the longest row, and padded to three times that with NaN in every padded slot."""
    draw = torch.Generator().manual_seed(2)
    lengths = torch.tensor([4, 1, 7, 0, 3])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(ends[-1])
    flat = [-3 * torch.rand(total, generator=draw, dtype=dtype) for _ in range(2)]
    flat[1] = flat[0] + 0.4 * torch.randn(total, generator=draw, dtype=dtype)
    flat += [torch.randn(total, generator=draw, dtype=dtype), flat[1] + 0.1]
    mask = torch.rand(total, generator=draw) < 0.8
    arguments = {"fraction": 0.0} if name == "clip_cov" else {}  # what it draws at random depends on the layout
    loss = partial(getattr(losses, name), **arguments)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-6  # weights are fp32 and the same in each layout
    expected = _terms_of(loss, flat, mask, mode, cu_seqlens=ends)
    for factor in (1, 3):
        padded = [flat_to_padded(values, ends, math.nan) for values in flat]
        wide = [torch.nn.functional.pad(p, (0, (factor - 1) * p.shape[1]), value=math.nan) for p in padded]
        wide_mask = torch.nn.functional.pad(flat_to_padded(mask, ends, False), (0, (factor - 1) * padded[0].shape[1]))
        found = _terms_of(loss, wide, wide_mask, mode)
        assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
        assert torch.allclose(found[1], expected[1], rtol=tolerance, atol=tolerance)
        assert found[2] == pytest.approx(expected[2], rel=tolerance, abs=tolerance)


def test_the_plan_does_not_depend_on_order_or_ranks() -> None:
    facts = [
        RowFact(
            uid=f"prompt-{row // 4}", sample_index=row % 4, reward=float(row), length=5 + 3 * row,
            num_response_tokens=3, num_loss_tokens=3, truncated=False, skipped=False, rank=row % 2, row=row // 2,
        )
        for row in range(16)
    ]  # fmt: skip

    def members(given: list[RowFact], ranks: int) -> list[set[tuple[str, int]]]:
        plan = build_step_plan(given, mini_batch_size=8, data_parallel_size=ranks, seed=3)
        return [
            {(plan.facts[row].uid, plan.facts[row].sample_index) for rows in batch.rows_of_rank for row in rows}
            for batch in plan.mini_batches
        ]

    expected = members(facts, 1)
    for ranks in (1, 2, 4):
        assert members(facts, ranks) == members(facts[::-1], ranks) == expected


EVERYTHING: dict[str, Any] = {
    "max_rl_steps": 2,
    "mini_batch_size": 8,
    "num_epochs": 2,
    "policy_loss": "clip_cov",
    "policy_loss_args": {"fraction": 0.1, "covariance_range": [0.01, 5.0]},
    "aggregation": "seq-mean-token-mean",
    "rollout_correction": "token_tis",
    "kl_coef": 0.1,
    "kl_in": "reward",
    "kl_target": 0.01,
    "kl_horizon": 100,
    "reference_every": 1,
    "reference_share": 0.5,
    "entropy_target": 9.0,
}
MAKERS: dict[str, Callable[..., Any]] = {"grpo": toy_module, "ppo": toy_ppo}


def _fit(root: Path, model: Path, algorithm: str, *, strategy: str = "auto", devices: int = 1) -> dict[str, Any]:
    recorder = Recorder()
    trainer = toy_trainer(root, callbacks=[recorder], strategy=strategy, devices=devices)
    module = MAKERS[algorithm](model, **EVERYTHING)
    trainer.fit(module, toy_data())
    return {
        "metrics": [step["metrics"] for step in recorder.steps],
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(module).items()},
    }


@pytest.mark.parametrize("algorithm", MAKERS)
def test_one_two_and_four_ranks_give_one_run(tmp_path: Path, tiny_directory: Path, algorithm: str) -> None:
    """Every metric but times and what a push compares, with everything on."""
    alone = _fit(tmp_path, tiny_directory, algorithm)
    for ranks in (2, 4):
        results = run_distributed(
            _fit, ranks, tmp_path, tiny_directory, algorithm, strategy="fsdp2_rl", devices=ranks,
            init_process_group=False, timeout=180.0,
        )  # fmt: skip
        for result in results:
            for step, expected in zip(result["metrics"], alone["metrics"], strict=True):
                assert step.keys() == expected.keys()
                for name in step.keys() - {key for key in step if key.startswith("sync/")}:
                    assert step[name] == pytest.approx(expected[name], rel=2e-4, abs=2e-5), (ranks, name)
            for name, value in alone["parameters"].items():
                assert torch.allclose(torch.tensor(result["parameters"][name]), torch.tensor(value), atol=1e-5), name
