"""The packed model against the Hugging Face model on each sequence alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.experience import make_experience
from support.tiny import Family, tiny_model, write_tiny_model
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_rlhf.engines.hf_model import PackedCausalLM, load_causal_lm
from lightning_rlhf.types import Experience


def _packed(model: PreTrainedModel, **kwargs: bool) -> PackedCausalLM:
    loaded = load_causal_lm(model, trained=True, gradient_checkpointing=kwargs.get("gradient_checkpointing", False))
    return PackedCausalLM(loaded, logits_chunk_size=7)


def _score(model: PackedCausalLM, data: Experience, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    mask = data.response_mask if mask is None else mask
    log_probs, entropy = model(data.tokens, data.cu_seqlens, mask, data.temperature, True)
    return log_probs, entropy


def _alone(model: PreTrainedModel, data: Experience) -> tuple[Tensor, Tensor]:
    """Full logits, one sequence at a time, by the model's own forward and attention."""
    log_probs, entropies = [], []
    for start, end in zip(data.cu_seqlens, data.cu_seqlens[1:], strict=False):
        ids = data.tokens[start:end]
        log_p = (model(input_ids=ids[None]).logits[0] / data.temperature).log_softmax(-1)
        log_probs += [torch.zeros(1), log_p[torch.arange(len(ids) - 1), ids[1:]]]
        entropies += [torch.zeros(1), -(log_p.exp() * log_p).sum(-1)[:-1]]
    return torch.cat(log_probs) * data.response_mask, torch.cat(entropies) * data.response_mask


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_packed_equals_each_sequence_alone(family: Family, tied: bool) -> None:
    data = make_experience([9, 3, 40, 4, 17], temperature=0.8)
    reference, model = tiny_model(family=family, tied=tied), _packed(tiny_model(family=family, tied=tied))
    expected, found = _alone(reference, data), _score(model, data)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-5)
    for outputs in (expected, found):
        (outputs[0] * data.advantages - 0.1 * outputs[1]).sum().backward()
    gradients = dict(model.causal_lm.named_parameters())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, atol=2e-5, rtol=1e-4)


def test_another_sequence_in_the_pack_changes_nothing() -> None:
    model = _packed(tiny_model())
    data = make_experience([9, 30])
    both, _ = _score(model, data)
    first, _ = _score(model, data.select([0]))
    second, _ = _score(model, data.select([1]))
    torch.testing.assert_close(both, torch.cat([first, second]), atol=1e-6, rtol=0)


def test_a13_log_probs_stand_at_the_token_that_they_describe() -> None:
    # a model of three tokens whose logit is log 8 for the next id (0 -> 1 -> 2 -> 0) and 0 for the others
    config = LlamaConfig(
        vocab_size=3, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, rms_norm_eps=1e-12
    )
    hf = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in hf.model.layers.parameters():
            parameter.zero_()  # a layer that adds nothing
        hf.model.embed_tokens.weight.copy_(torch.eye(3, 4))
        hf.model.norm.weight.fill_(0.5)  # undoes the norm of a unit vector in four dimensions
        hf.lm_head.weight.copy_(math.log(8) * torch.eye(3, 4)[[2, 0, 1]])
    model = _packed(hf)
    tokens, starts = torch.tensor([0, 1, 2, 0, 1, 0, 2]), torch.tensor([0, 5, 7])
    response = torch.tensor([False, False, True, True, True, False, True])
    log_probs, _ = model(tokens, starts, response, 1.0, False)
    torch.testing.assert_close(log_probs[:5], torch.tensor([0, 0, -0.2231, -0.2231, -0.2231]), atol=1e-4, rtol=0)
    # the second sequence: 2 does not follow 0
    torch.testing.assert_close(log_probs[5:], torch.tensor([0, math.log(0.1)]), atol=1e-4, rtol=0)


def test_only_marked_tokens_are_scored_and_never_a_first_one() -> None:
    model = _packed(tiny_model())
    data = make_experience([4, 3])
    everywhere, _ = _score(model, data, torch.ones(7, dtype=torch.bool))
    assert (everywhere == 0).tolist() == [True, False, False, False, True, False, False]
    mask = torch.tensor([True, False, True, False, False, False, True])
    some, entropy = _score(model, data, mask)
    scored = mask & (data.position_ids > 0)
    torch.testing.assert_close(some, everywhere * scored)
    assert torch.equal(entropy != 0, scored)
    heads: list[int] = []
    model.causal_lm.model.norm.register_forward_hook(lambda *args: heads.append(args[-1].shape[1]))
    none, _ = _score(model, data, torch.zeros(7, dtype=torch.bool))
    none.sum().backward()
    assert heads == [7]
    assert model.causal_lm.model.embed_tokens.weight.grad is not None


def test_gradient_checkpointing_changes_no_gradient() -> None:
    data = make_experience([9, 14, 3])
    plain, checkpointed = _packed(tiny_model()), _packed(tiny_model(), gradient_checkpointing=True)
    recomputed: list[int] = []
    checkpointed.causal_lm.model.layers[0].mlp.register_forward_pre_hook(lambda *args: recomputed.append(1))
    for model in (plain, checkpointed):
        model.train()
        _score(model, data)[0].sum().backward()
    assert len(recomputed) == 2
    for mine, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_sliding_window_is_kept() -> None:
    config = tiny_model().config.to_dict() | {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention", "sliding_attention"],
    }
    torch.manual_seed(0)
    hf = Qwen3ForCausalLM(Qwen3Config(**config))
    data = make_experience([20, 3])
    expected, _ = _alone(hf, data)
    found, _ = _score(_packed(hf), data)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_from_a_directory_in_fp32(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", tied=True)
    loaded = load_causal_lm(path, trained=True, gradient_checkpointing=False)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    data = make_experience([12])
    expected, _ = _alone(tiny_model(tied=True), data)
    torch.testing.assert_close(_score(_packed(loaded), data)[0], expected, atol=2e-6, rtol=1e-5)


def test_a_trained_module_is_taken_and_a_frozen_one_copied() -> None:
    mine = tiny_model().to(torch.bfloat16)
    frozen = load_causal_lm(mine, trained=False, gradient_checkpointing=False)
    assert frozen is not mine
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    trained = load_causal_lm(mine, trained=True, gradient_checkpointing=False)
    assert trained is mine
    assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in trained.parameters())
    with torch.no_grad():
        trained.lm_head.weight.add_(1)
    assert not torch.equal(trained.lm_head.weight, frozen.lm_head.weight)


def test_modules_that_are_not_language_models_are_refused() -> None:
    with pytest.raises(TypeError, match="got Linear"):
        load_causal_lm(nn.Linear(2, 2), trained=True, gradient_checkpointing=False)


def test_check_passes_for_plain_models_and_names_a_head_that_does_more() -> None:
    for family in ("qwen3", "llama"):
        model = _packed(tiny_model(family=family)).train()
        model.check()
        assert model.training
    scaled = CohereForCausalLM(
        CohereConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            logit_scale=0.25,
        )
    )
    with pytest.raises(ValueError, match=r"CohereForCausalLM's logits are not"):
        _packed(scaled).check()


class _Leaky(nn.Module):
    """Adds the state of the token before, whichever sequence it is of, as a convolution does."""

    def forward(self, states: Tensor) -> Tensor:
        return states + F.pad(states, (0, 0, 1, -1))


def test_check_names_a_model_whose_layers_mix_neighbours() -> None:
    hf = tiny_model()
    hf.model.norm = nn.Sequential(hf.model.norm, _Leaky())
    with pytest.raises(ValueError, match="some layer mixes neighbours"):
        _packed(hf).check()


def test_decoder_layers_are_found() -> None:
    assert [type(layer).__name__ for layer in _packed(tiny_model(layers=3)).layers()] == ["Qwen3DecoderLayer"] * 3
