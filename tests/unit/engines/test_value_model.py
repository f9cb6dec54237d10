"""The value model: what describes a token is read at the state before it, and training cuts as it likes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.experience import make_experience
from support.tiny import Family, tiny_model
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification, PreTrainedModel, Qwen3ForSequenceClassification

from lightning_rlhf.algorithms.value_losses import value_loss
from lightning_rlhf.batching.packing import flat_to_padded
from lightning_rlhf.contracts.engine import EngineConfig, EngineRegistry
from lightning_rlhf.engines.hf_model import load_causal_lm
from lightning_rlhf.engines.value_head import FSDP2ValueEngine, PackedValueModel, TorchValueEngine, ValueModel
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CPU = torch.device("cpu")
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
LENGTHS = [5, 30, 8, 17, 3, 40, 12, 9]


def _fill_head(engine: TorchValueEngine) -> None:
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        head = engine.hf_model.get_parameter("score.weight")
        head.copy_(0.1 * torch.randn(head.shape, generator=draw))


def _engine(**kwargs: Any) -> TorchValueEngine:
    engine = TorchValueEngine(EngineConfig(**{"model": tiny_model(), "optimizer": ADAMW, **kwargs}), device=CPU)
    engine.initialize()
    _fill_head(engine)
    return engine


def _regression(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    """The squared error to the advantages, which stand for returns here."""
    assert outputs.values is not None
    assert outputs.log_probs is None
    old = torch.zeros_like(outputs.values)
    return value_loss(outputs.values, old, micro_batch.advantages, micro_batch.loss_mask)


def test_the_registry_knows_it() -> None:
    assert EngineRegistry.get("value_model", "torch", "cpu") is TorchValueEngine
    assert EngineRegistry.get("value_model", "fsdp2", "cuda") is FSDP2ValueEngine


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_values_are_those_of_each_sequence_alone(family: Family) -> None:
    """Compared with transformers' own model of one label, whose parameters have the same names."""
    engine = _engine(model=tiny_model(family=family))
    data = make_experience(LENGTHS, temperature=0.5)
    reference_class = {"qwen3": Qwen3ForSequenceClassification, "llama": LlamaForSequenceClassification}[family]
    config = tiny_model(family=family).config
    config.num_labels = 1
    reference: PreTrainedModel = reference_class(config).float()
    reference.load_state_dict(dict(engine.get_per_tensor_param()), strict=True)
    expected = torch.zeros(data.num_tokens)
    for start, end in zip(data.cu_seqlens.tolist(), data.cu_seqlens[1:].tolist(), strict=False):
        states = reference.base_model(input_ids=data.tokens[None, start:end]).last_hidden_state[0]
        # the state at position t values the token that is drawn there, t + 1
        expected[start + 1 : end] = reference.score(states)[:-1, 0].detach()
    outputs = engine.infer_batch(data)
    assert outputs.log_probs is None
    assert outputs.values is not None
    torch.testing.assert_close(outputs.values, expected * data.response_mask, atol=1e-5, rtol=1e-5)


class _Positions(nn.Module):
    """A decoder whose hidden state at position t is t, in its first place."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        states = torch.zeros(*input_ids.shape, 64)
        states[..., 0] = position_ids
        return type("Output", (), {"last_hidden_state": states})()


def test_a13_values_are_read_one_position_before_and_the_padding_has_none() -> None:
    """Ids [0, 1, 2, 0, 1] with attention mask [1, 1, 1, 1, 0] and response length 3: value mask [1, 1, 0]."""
    model = ValueModel(load_causal_lm(tiny_model(), trained=False, gradient_checkpointing=False))
    model.model = _Positions()
    with torch.no_grad():
        model.score.weight.zero_()
        model.score.weight[0, 0] = 1.0
    response_mask = torch.tensor([False, False, True, True])
    cu_seqlens = torch.tensor([0, 4])
    (values,) = PackedValueModel(model)(torch.tensor([0, 1, 2, 0]), cu_seqlens, response_mask, 1.0, True)
    assert values is not None
    assert values.tolist() == [0.0, 0.0, 1.0, 2.0]  # read at positions 1 and 2; position 3 is before no token
    padded = torch.cat([response_mask, torch.tensor([False])])  # the fifth id
    assert padded[2:].tolist() == [True, True, False]
    assert flat_to_padded(values, cu_seqlens, 0.0)[0, 2:].tolist() == [1.0, 2.0]


def test_the_head_starts_at_zero_and_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    engine = TorchValueEngine(EngineConfig(model=tiny_model(), optimizer=ADAMW), device=CPU)
    engine.initialize()
    assert torch.equal(torch.rand(2), expected)
    values = engine.infer_batch(make_experience([6, 4])).values
    assert values is not None
    assert not values.any()


CUTS = [{}, {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"max_tokens_per_micro_batch": 48}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_loss_and_gradient_do_not_depend_on_the_cut(cut: dict[str, int]) -> None:
    data = make_experience(LENGTHS)
    assert data.loss_weights is not None
    engine, reference = _engine(**cut), _engine()
    total = torch.zeros(())
    for row in range(len(LENGTHS)):
        one = data.select([row])
        (values,) = reference.packed(one.tokens, one.cu_seqlens, one.response_mask, 1.0, False)
        assert values is not None
        assert one.loss_weights is not None
        total = total + ((values - one.advantages).square() / 2 * one.loss_weights).sum()
    total.backward()
    metrics = engine.forward_backward_batch(data, _regression)
    assert metrics["loss"].compute() == pytest.approx(total.item(), rel=1e-6)
    for name, parameter in reference.hf_model.named_parameters():
        found = engine.hf_model.get_parameter(name).grad
        torch.testing.assert_close(found, parameter.grad, atol=1e-5, rtol=1e-4)
    assert engine.hf_model.get_parameter("score.weight").grad is not None


def test_it_learns_a_target(tmp_path: Path) -> None:
    data = make_experience(LENGTHS)
    data.advantages[data.response_mask] = (data.tokens[data.response_mask] % 2).float()
    engine = TorchValueEngine(EngineConfig(model=tiny_model(), optimizer=partial(ADAMW, lr=3e-3)), device=CPU)
    engine.initialize()
    losses = [engine.train_batch(data, _regression)["loss"] for _ in range(30)]
    assert losses[-1] < losses[0] / 5


def test_state_survives_a_checkpoint(tmp_path: Path) -> None:
    data = make_experience(LENGTHS)
    engine = _engine()
    engine.train_batch(data, _regression)
    engine.save_checkpoint(tmp_path / "critic")
    other = _engine()
    other.load_checkpoint(tmp_path / "critic")
    assert [other.train_batch(data, _regression) for _ in range(2)] == [
        engine.train_batch(data, _regression) for _ in range(2)
    ]
    for (name, mine), (_, theirs) in zip(engine.get_per_tensor_param(), other.get_per_tensor_param(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_frozen_one_has_no_gradient() -> None:
    engine = TorchValueEngine(EngineConfig(model=tiny_model()), device=CPU)
    engine.initialize()
    assert not any(parameter.requires_grad for parameter in engine.hf_model.parameters())


def test_an_empty_share_gives_no_values() -> None:
    values = _engine().infer_batch(make_experience([])).values
    assert values is not None
    assert values.shape == (0,)


def test_a_model_without_a_decoder_of_its_own_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="no decoder apart from its head"):
        ValueModel(model.base_model)
