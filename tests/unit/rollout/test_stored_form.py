"""The way from transformers' tensors to those of files: what save_pretrained writes, a few tensors at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from support.rollout import perturb
from support.tiny import tiny_model
from support.tiny_experts import ExpertFamily, tiny_experts
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    HrmTextConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
)

from lightning_rlhf.rollout.model_directory import weight_names_of
from lightning_rlhf.rollout.stored_form import StoredForm


def pushed(model: PreTrainedModel, named: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    names = weight_names_of(model)
    converted = list(names.in_files(names.check(named)))
    assert len({name for name, _ in converted}) == len(converted)
    return dict(converted)


def in_file(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check_is_what_files_hold(model: PreTrainedModel, folder: Path) -> None:
    """From either form, in any order."""
    expected = in_file(model, folder)
    own = list(model.state_dict().items())
    random.Random(0).shuffle(own)
    for form in (own, list(reversed(expected.items()))):
        found = pushed(model, form)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", get_args(ExpertFamily))
def test_experts_become_what_files_hold(tmp_path: Path, family: ExpertFamily) -> None:
    model = tiny_experts(family)
    perturb(model, seed=1)
    check_is_what_files_hold(model, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            DeepseekV3Config(
                n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
                moe_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, hidden_size=64,
                intermediate_size=64, num_hidden_layers=2, vocab_size=64, q_lora_rank=16, kv_lora_rank=16,
            ),
            id="deepseek-v3",
        ),
        pytest.param(
            Qwen3_5MoeTextConfig(
                num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                num_attention_heads=2, num_key_value_heads=1, hidden_size=64, num_hidden_layers=4, vocab_size=64,
                head_dim=32,
            ),
            id="qwen3.5-moe",
        ),
    ],
)  # fmt: skip
def test_families_without_a_tiny_model_of_ours(tmp_path: Path, config: Any) -> None:
    check_is_what_files_hold(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path)


def test_tensors_that_make_one_of_a_file_wait_for_each_other(tmp_path: Path) -> None:
    """HRM's files hold q, k, v and a gate in one tensor; a transport may write into its buffer meanwhile."""
    config = HrmTextConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32, vocab_size=64
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    check_is_what_files_hold(model, tmp_path)
    expected = in_file(model, tmp_path)
    names = weight_names_of(model)
    assert any("gqkv" in name for name in names.stored)
    assert not any("gqkv" in name for name in names.shapes)

    def through_one_buffer() -> Any:
        for name, tensor in model.state_dict().items():
            copy = tensor.clone()
            yield name, copy
            copy.fill_(float("nan"))

    for name, tensor in names.in_files(names.check(through_one_buffer())):
        assert torch.equal(tensor, expected[name]), name


def test_a_model_whose_files_have_its_own_tensors_has_no_second_form() -> None:
    names = weight_names_of(tiny_model())
    assert names.stored == {}
    assert names.stored_form is None


def test_what_cannot_be_turned_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    model = tiny_experts("mixtral")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    revert = core_model_loading.revert_weight_conversion

    def needs_all(model: PreTrainedModel, named: dict[str, Tensor]) -> dict[str, Tensor]:
        if len(named) < len(shapes) and any("gate_up_proj" in name for name in named):
            raise ValueError("down_proj is needed, too")
        return revert(model, named)

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", needs_all)
    with pytest.raises(ValueError, match=r"Mixtral.*'model.layers.0.mlp.experts.gate_up_proj'.*down_proj is needed"):
        StoredForm(model, shapes)

    def other_tensor(model: PreTrainedModel, named: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.t().contiguous() if "q_proj" in name else tensor for name, tensor in named.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", other_tensor)
    with pytest.raises(ValueError, match=r"'model.layers.[01].self_attn.q_proj.weight' that is not the model's"):
        StoredForm(model, shapes)
