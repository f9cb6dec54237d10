"""LoRA: the formula by hand, the base untouched, what a checkpoint holds, what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.experience import make_experience, policy_gradient
from support.tiny import tiny_model
from torch import Tensor
from torch.func import functional_call

from lightning_rlhf.contracts.engine import EngineConfig, EngineRegistry
from lightning_rlhf.contracts.lora import LoRAConfig
from lightning_rlhf.engines.adapter import adapter_facts, adapter_layers, write_adapter
from lightning_rlhf.engines.checkpoint import read_model
from lightning_rlhf.engines.megatron.engine import MegatronEngine
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.engines.value_head import TorchValueEngine

CPU = torch.device("cpu")
LORA = LoRAConfig(rank=4, alpha=8.0)
"""Scale 2."""
LENGTHS = [5, 30, 8, 17]
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, weight_decay=0.1)


def lora_engine(**changes: Any) -> TorchEngine:
    settings = {"model": tiny_model(), "optimizer": ADAMW, "max_grad_norm": None, "lora": LORA}
    engine = TorchEngine(EngineConfig(**{**settings, **changes}), device=CPU)
    engine.initialize()
    return engine


def exported(engine: TorchEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.get_per_tensor_param()}


def factors(engine: TorchEngine) -> dict[str, tuple[Tensor, Tensor]]:
    """``A`` and ``B`` by the weight that they change."""
    return {
        f"{name}.weight": (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
        for name, layer in adapter_layers(engine.hf_model)
    }


def test_training_is_that_of_the_formula_written_out() -> None:
    engine, plain, data = lora_engine(), tiny_model(), make_experience(LENGTHS)
    weights = dict(plain.requires_grad_(False).named_parameters())
    mine = {name: tuple(f.detach().clone().requires_grad_() for f in pair) for name, pair in factors(engine).items()}
    assert len(mine) == 14, "7 linear layers of 2 decoder layers"
    optimizer = ADAMW([factor for pair in mine.values() for factor in pair])

    def merged() -> dict[str, Tensor]:
        return {**weights, **{name: weights[name] + 2.0 * b @ a for name, (a, b) in mine.items()}}

    assert data.loss_weights is not None
    for _ in range(3):
        total = torch.zeros(())
        for row in range(len(data)):
            one = data.select([row])
            logits = functional_call(plain, merged(), (one.tokens[None],)).logits[0, :-1]
            log_p = logits.log_softmax(-1)
            chosen = log_p.gather(-1, one.tokens[1:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            terms = -chosen * one.advantages[1:] - 0.1 * entropy
            assert one.loss_weights is not None
            total = total + (terms * one.loss_weights[1:]).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        assert engine.train_batch(data, policy_gradient)["loss"] == pytest.approx(total.item(), abs=1e-6)
    found, expected = exported(engine), merged()
    assert found.keys() == weights.keys(), "Hugging Face names, each once"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach(), atol=1e-6, rtol=0)
        moved = not torch.equal(found[name], weights[name])
        assert moved == (name in mine), f"{name}: only what has an adapter moves"


def test_the_merged_weight_is_base_plus_scaled_product_bit_for_bit_and_the_base_stays() -> None:
    engine, base = lora_engine(), dict(tiny_model().named_parameters())
    engine.train_batch(make_experience(LENGTHS), policy_gradient)
    for _ in range(3):
        found = exported(engine)
        for name, (a, b) in factors(engine).items():
            assert torch.equal(found[name], base[name] + 2.0 * (b @ a)), name
            own = engine.hf_model.get_parameter(name.replace(".weight", ".base_layer.weight"))
            assert torch.equal(own, base[name]), f"{name}: merging must not touch the base"


def test_the_optimizer_has_the_factors_alone() -> None:
    engine = lora_engine()
    assert engine.optimizer is not None
    held = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    assert len(held) == 28
    assert all(parameter.requires_grad for parameter in held)


def test_without_its_adapter_it_is_the_model_that_was_given() -> None:
    engine, data = lora_engine(), make_experience(LENGTHS)
    frozen = TorchEngine(EngineConfig(model=tiny_model()), device=CPU)
    frozen.initialize()
    with engine.disable_adapter():  # before the first step as well: it must not cost the factors their gradients
        engine.infer_batch(data)
    engine.train_batch(data, policy_gradient)
    expected = frozen.infer_batch(data).log_probs
    with engine.disable_adapter():
        assert torch.equal(engine.infer_batch(data).log_probs, expected)  # type: ignore[arg-type]
    moved = engine.infer_batch(data).log_probs
    assert moved is not None
    assert (moved - expected).abs().max() > 1e-3  # type: ignore[operator]


def test_the_runs_random_numbers_are_left_alone_and_ranks_draw_alike() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = lora_engine()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    two, other = lora_engine(), lora_engine(lora=LoRAConfig(rank=4, alpha=8.0, seed=1))
    for name, (a, b) in factors(one).items():
        assert torch.equal(a, factors(two)[name][0])
        assert not torch.equal(a, factors(other)[name][0])
        assert not b.any()


def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    engine, data = lora_engine(), make_experience(LENGTHS)
    for _ in range(2):
        engine.train_batch(data, policy_gradient)
    engine.save_checkpoint(tmp_path / "step")
    assert all(".lora_" in name for name, _ in read_model(tmp_path / "step"))
    again = lora_engine(lora=LoRAConfig(rank=4, alpha=8.0, seed=9))
    again.load_checkpoint(tmp_path / "step")
    for one in (engine, again):
        one.train_batch(data, policy_gradient)
    for name, value in exported(engine).items():
        assert torch.equal(value, exported(again)[name]), name
    full = lora_engine(lora=None)
    with pytest.raises(ValueError, match=r"lacks 25 tensors .* with \(without\) lora"):
        full.load_checkpoint(tmp_path / "step")


def test_a_value_model_trains_its_head_beside_the_adapter() -> None:
    engine = TorchValueEngine(EngineConfig(model=tiny_model(), optimizer=ADAMW, lora=LORA), device=CPU)
    engine.initialize()
    trained = [name for name, parameter in engine.hf_model.named_parameters() if parameter.requires_grad]
    assert "score.weight" in trained
    assert all(".lora_" in name or name == "score.weight" for name in trained)


def test_peft_reads_what_is_written_and_computes_the_same(tmp_path: Path) -> None:
    engine, data = lora_engine(), make_experience(LENGTHS)
    engine.train_batch(data, policy_gradient)
    write_adapter(tmp_path, LORA, engine.hf_model.named_parameters(), base="tiny", dtype=None)
    theirs = peft.PeftModel.from_pretrained(tiny_model(), tmp_path).merge_and_unload()
    for name, value in exported(engine).items():
        torch.testing.assert_close(theirs.get_parameter(name).detach(), value, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"lora_dropout": 0.1}, "lora_dropout=0.1"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["lm_head"]}, "reaches the head"),
        ({"target_modules": ["embed_tokens"]}, "Embedding; adapters are for linear layers"),
    ],
)
def test_what_would_not_be_the_formula_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lora_engine(lora=peft.LoraConfig(**{"target_modules": ["q_proj"], **settings}))


def test_pefts_own_config_with_patterns_and_root_rank() -> None:
    given = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 9}
    )
    engine = lora_engine(lora=given)
    scales = {name.split(".")[-1]: layer.scaling["default"] for name, layer in adapter_layers(engine.hf_model)}
    assert scales == {"q_proj": 3.0, "v_proj": 2.0}  # 6 / sqrt(4), 6 / sqrt(9)
    assert adapter_facts(adapter_facts(given)) == adapter_facts(given)


def test_refusals_by_name() -> None:
    with pytest.raises(TypeError, match="LoRAConfig or a peft"):
        adapter_facts("q_proj")
    with pytest.raises(ValueError, match="rank >= 1"):
        LoRAConfig(rank=0)
    config = EngineConfig(model=tiny_model(), optimizer=ADAMW, lora=LORA)
    with pytest.raises(ValueError, match="lora= does not work with MegatronEngine"):
        EngineRegistry.new("language_model", "megatron", config, device=CPU)
    assert not MegatronEngine.can_adapt


def test_frozen_parameters_of_a_module_stay_and_are_not_in_the_optimizer() -> None:
    model = tiny_model()
    model.get_input_embeddings().requires_grad_(False)
    engine = lora_engine(model=model, lora=None)
    assert engine.optimizer is not None
    held = {id(parameter) for group in engine.optimizer.param_groups for parameter in group["params"]}
    assert id(model.get_input_embeddings().weight) not in held
    assert len(held) == len(list(model.parameters())) - 1
    engine.train_batch(make_experience(LENGTHS), policy_gradient)
    for name, before in tiny_model().named_parameters():
        assert torch.equal(before, exported(engine)[name]) == (name == "model.embed_tokens.weight"), name
    with pytest.raises(ValueError, match="All parameters of the Qwen3ForCausalLM are frozen"):
        lora_engine(model=tiny_model().requires_grad_(False), lora=None)
