"""The one-process engine: the loss is one weighted sum, however it is cut; the step; inference; export."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.experience import make_experience, policy_gradient
from support.tiny import tiny_model
from support.tiny_experts import tiny_experts
from torch import Tensor

from lightning_rlhf.contracts.engine import EngineConfig, EngineRegistry
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.metrics import Metric
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CPU = torch.device("cpu")
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
LENGTHS = [5, 30, 8, 17, 3, 40, 12, 9]


def _engine(**kwargs: Any) -> TorchEngine:
    engine = TorchEngine(EngineConfig(**{"model": tiny_model(), "optimizer": ADAMW, **kwargs}), device=CPU)
    engine.initialize()
    return engine


def _gradients(engine: TorchEngine) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in engine.causal_lm.named_parameters() if p.grad is not None}


def _constant(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    """Terms from the data alone."""
    return LossOutput(terms=micro_batch.advantages, metrics={"seen": Metric.sum(micro_batch.loss_mask)})


def test_the_registry_knows_it() -> None:
    assert EngineRegistry.get("language_model", "torch", "cpu") is TorchEngine


CUTS = [{}, {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"max_tokens_per_micro_batch": 48}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_loss_and_gradient_are_those_of_each_sequence_alone(cut: dict[str, int]) -> None:
    data = make_experience(LENGTHS)
    assert data.loss_weights is not None
    reference = tiny_model()
    total = torch.zeros(())
    for start, end in zip(data.cu_seqlens, data.cu_seqlens[1:], strict=False):
        log_p = reference(input_ids=data.tokens[None, start:end]).logits[0].log_softmax(-1)[:-1]
        chosen = log_p.gather(-1, data.tokens[start + 1 : end, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        rows = slice(int(start) + 1, int(end))
        terms = -chosen * data.advantages[rows] - 0.1 * entropy
        total = total + (terms * data.loss_weights[rows]).sum()
    total.backward()
    engine = _engine(**cut)
    metrics = engine.forward_backward_batch(data, policy_gradient)
    assert metrics["loss"].compute() == pytest.approx(total.item(), abs=1e-6)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(_gradients(engine)[name], parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, None])
def test_a03_tokens_weigh_the_same_in_every_micro_batch(micro_batch_size: int | None) -> None:
    # valid tokens and mean losses: (4, 1), (2, 5), (1, 8), (1, 0): 22 over 8 tokens
    data = make_experience([6, 4, 3, 3])
    data.advantages[data.response_mask] = torch.tensor([1.0] * 4 + [5.0] * 2 + [8.0] + [0.0])
    metrics = _engine(micro_batch_size=micro_batch_size).forward_backward_batch(data, _constant)
    assert metrics["loss"].compute() == pytest.approx(2.75)
    assert metrics["seen"].compute() == 8


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_i01_the_logged_loss_does_not_depend_on_the_number_of_micro_batches(micro_batch_size: int) -> None:
    data = make_experience([4, 4, 4, 4])
    data.advantages[data.response_mask] = torch.tensor([1.0, 1, 2, 2, 3, 3, 6, 6])
    engine = _engine(micro_batch_size=micro_batch_size)
    assert engine.train_batch(data, _constant)["loss"] == pytest.approx(3.0)


class _Echo(TorchEngine):
    """Gives each token ten times its id for a log-prob, and counts micro-batches."""

    def _forward(self, micro_batch: Experience, shared: Any, *, entropy: bool) -> ModelOutputs:
        self.sizes = [*self.sizes, micro_batch.num_tokens] if "sizes" in vars(self) else [micro_batch.num_tokens]
        return ModelOutputs(log_probs=10.0 * micro_batch.tokens, entropy=None)


@pytest.mark.parametrize("cut", [{"max_tokens_per_micro_batch": 11}, {"micro_batch_size": 2}, {}], ids=str)
def test_b04_outputs_come_back_in_the_callers_order(cut: dict[str, int]) -> None:
    data = make_experience([2, 9, 3, 8, 4])
    data.tokens.copy_(data.sequence_ids)
    engine = _Echo(EngineConfig(model=tiny_model(), **cut), device=CPU)
    engine.initialize()
    log_probs = engine.infer_batch(data).log_probs
    assert log_probs is not None
    assert log_probs[data.cu_seqlens[:-1]].tolist() == [0, 10, 20, 30, 40]
    assert torch.equal(log_probs, 10.0 * data.sequence_ids)
    if "max_tokens_per_micro_batch" in cut:
        assert max(engine.sizes) <= 11
        assert len(engine.sizes) == 3


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_inference_gives_what_training_sees(cut: dict[str, int]) -> None:
    data = make_experience(LENGTHS, temperature=0.7)
    engine = _engine(**cut)
    inferred = engine.infer_batch(data, entropy=True)
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def record(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
        assert outputs.log_probs is not None
        assert outputs.entropy is not None
        for row, index in enumerate(micro_batch.sample_indices):
            span = slice(int(micro_batch.cu_seqlens[row]), int(micro_batch.cu_seqlens[row + 1]))
            seen[index] = outputs.log_probs[span].detach(), outputs.entropy[span].detach()
        return LossOutput(terms=outputs.log_probs)

    engine.forward_backward_batch(data, record)
    # the same micro-batches in both, so a first step's probability ratio is exactly 1 (A10)
    assert torch.equal(inferred.log_probs, torch.cat([seen[row][0] for row in range(len(data))]))
    assert torch.equal(inferred.entropy, torch.cat([seen[row][1] for row in range(len(data))]))
    assert engine.infer_batch(data).entropy is None
    assert bool((inferred.log_probs[~data.response_mask] == 0).all())


def test_no_rows_give_zero_gradients_and_an_empty_answer() -> None:
    engine = _engine()
    empty = make_experience(LENGTHS).select([])
    metrics = engine.forward_backward_batch(empty, policy_gradient)
    assert metrics["loss"].compute() == 0.0
    gradients = _gradients(engine)
    assert len(gradients) == len(list(engine.causal_lm.parameters()))
    assert all(bool((gradient == 0).all()) for gradient in gradients.values())
    assert engine.infer_batch(empty, entropy=True).log_probs.shape == (0,)


def test_a_loss_that_reads_no_output_still_trains_without_error() -> None:
    engine = _engine()
    engine.forward_backward_batch(make_experience([5, 6]), _constant)
    assert all(bool((gradient == 0).all()) for gradient in _gradients(engine).values())


def test_forward_only_leaves_gradients_alone() -> None:
    engine = _engine()
    data = make_experience(LENGTHS)
    loss = engine.forward_backward_batch(data, policy_gradient, forward_only=True)["loss"].compute()
    assert _gradients(engine) == {}
    assert loss == pytest.approx(engine.forward_backward_batch(data, policy_gradient)["loss"].compute())


def test_missing_weights_and_misshapen_terms_are_named() -> None:
    engine = _engine()
    data = make_experience([5, 6])
    with pytest.raises(ValueError, match="no loss_weights"):
        engine.forward_backward_batch(dataclasses.replace(data, loss_weights=None), policy_gradient)

    def mean(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
        return LossOutput(terms=outputs.log_probs.mean())

    with pytest.raises(ValueError, match=r"one term per token, \[11\], got \(\)"):
        engine.forward_backward_batch(data, mean)
    with pytest.raises(ValueError, match="Sequence 1 has 6 tokens, more than the 5"):
        _engine(max_tokens_per_micro_batch=5).infer_batch(data)


def test_the_gradient_norm_is_global_and_clips() -> None:
    data = make_experience(LENGTHS)
    engine = _engine(optimizer=partial(torch.optim.SGD, lr=1.0), max_grad_norm=0.01)
    before = {name: value.clone() for name, value in engine.get_per_tensor_param()}
    engine.forward_backward_batch(data, policy_gradient)
    gradients = _gradients(engine)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    result = engine.optimizer_step()
    assert result is engine.last_step
    assert result.stepped
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    for name, value in engine.get_per_tensor_param():
        torch.testing.assert_close(before[name] - value, gradients[name] * 0.01 / norm, atol=1e-6, rtol=1e-3)


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    data = make_experience(LENGTHS)
    engine = _engine(lr_schedule=schedule)
    assert engine.train_batch(data, policy_gradient)["lr"] == pytest.approx(1e-3)
    before = {name: value.clone() for name, value in engine.get_per_tensor_param()}
    assert engine.optimizer is not None
    moments = [state["exp_avg"].clone() for state in engine.optimizer.state.values()]
    broken = dataclasses.replace(data, advantages=data.advantages.clone().fill_(torch.inf))
    metrics = engine.train_batch(broken, policy_gradient)
    assert metrics["skipped_steps"] == 1.0
    assert not math.isfinite(metrics["grad_norm"])
    assert metrics["lr"] == pytest.approx(5e-4)
    assert all(torch.equal(value, before[name]) for name, value in engine.get_per_tensor_param())
    assert all(
        torch.equal(state["exp_avg"], old) for state, old in zip(engine.optimizer.state.values(), moments, strict=True)
    )
    # the schedule has not moved either
    metrics = engine.train_batch(data, policy_gradient)
    assert (metrics["lr"], metrics["skipped_steps"]) == (pytest.approx(5e-4), 0.0)
    assert engine.train_batch(data, policy_gradient)["lr"] == pytest.approx(2.5e-4)


def test_training_lowers_the_loss_and_drops_gradients() -> None:
    engine = _engine(optimizer=partial(torch.optim.AdamW, lr=1e-2))
    data = make_experience(LENGTHS)
    losses = [engine.train_batch(data, policy_gradient)["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
    assert _gradients(engine) == {}


def test_modes_set_the_model_and_put_it_back() -> None:
    engine = _engine()
    engine.module.eval()
    with engine.train_mode():
        assert engine.module.training
        assert torch.is_grad_enabled()
    assert not engine.module.training
    engine.module.train()
    with engine.eval_mode():
        assert not engine.module.training
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert engine.module.training
    with pytest.raises(ValueError, match="no loss_weights"), engine.eval_mode():
        engine.forward_backward_batch(dataclasses.replace(make_experience([4]), loss_weights=None), policy_gradient)
    assert engine.module.training


def test_a_frozen_engine_scores_and_does_not_train() -> None:
    engine = _engine(optimizer=None, role="reference")
    data = make_experience(LENGTHS)
    log_probs = engine.infer_batch(data).log_probs
    torch.testing.assert_close(log_probs, _engine().infer_batch(data).log_probs)
    assert engine.optimizer is None
    with pytest.raises(RuntimeError, match="reference engine has no optimizer"):
        engine.train_batch(data, policy_gradient)
    with pytest.raises(RuntimeError, match="reference engine has no optimizer"):
        engine.optimizer_step()


def test_names_and_values_are_hugging_faces_and_a_tied_head_is_sent_once() -> None:
    for tied in (False, True):
        engine = _engine(model=tiny_model(tied=tied))
        reference = dict(tiny_model(tied=tied).named_parameters())
        exported = dict(engine.get_per_tensor_param())
        assert list(exported) == list(reference)
        assert ("lm_head.weight" in exported) is not tied
        assert all(torch.equal(exported[name], reference[name]) for name in reference)
        assert not any(value.requires_grad for value in exported.values())


def test_buffers_that_files_hold_are_sent_too() -> None:
    """The bias of GLM's router is one; rotary tables are none."""
    exported = dict(_engine(model=tiny_experts("glm4_moe")).get_per_tensor_param())
    expected = tiny_experts("glm4_moe").state_dict()
    assert exported.keys() == expected.keys()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert expected[name].abs().max() > 0
    assert torch.equal(exported[name], expected[name])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bf16_compute_keeps_fp32_parameters_and_log_probs(checkpointing: bool) -> None:
    data = make_experience(LENGTHS)
    engine = _engine(compute_dtype=torch.bfloat16, gradient_checkpointing=checkpointing)
    exact = _engine()
    low, high = engine.infer_batch(data).log_probs, exact.infer_batch(data).log_probs
    assert low is not None
    assert high is not None
    assert low.dtype is torch.float32
    assert 1e-5 < float((low - high).abs().max()) < 0.2
    engine.forward_backward_batch(data, policy_gradient)
    exact.forward_backward_batch(data, policy_gradient)
    for name, gradient in _gradients(engine).items():
        assert gradient.dtype is torch.float32
        reference = _gradients(exact)[name]
        assert float((gradient - reference).norm()) < 0.1 * float(reference.norm()) + 1e-6
    assert {value.dtype for _, value in engine.get_per_tensor_param()} == {torch.float32}


def test_use_before_initialize_is_named() -> None:
    engine = TorchEngine(EngineConfig(model=tiny_model()), device=CPU)
    uses: list[Callable[[], Any]] = [lambda: engine.infer_batch(make_experience([3])), engine.zero_grad]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"call initialize\(\) first"):
            use()


def test_moving_parameters_without_their_gradients_is_refused() -> None:
    engine = _engine()
    engine.train_batch(make_experience([5, 6]), policy_gradient)
    engine.to(CPU)
    engine.forward_backward_batch(make_experience([5, 6]), policy_gradient)
    with pytest.raises(ValueError, match="without their gradients"):
        engine.to(torch.device("meta"), grad=False)
