"""Mixtures of experts in real vLLM: pushes into its packed experts, and GRPO on them under megatron_rl."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.fork import run_distributed
from support.megatron_imports import megatron_is_imported  # noqa: F401 (a fixture)
from support.rollout import largest_difference, perturb, prompt_batch
from support.tiny import EOS_ID, HEAD_DIM, PAD_ID, VOCAB_SIZE, tiny_tokenizer
from support.tiny_experts import ExpertFamily, tiny_experts, write_tiny_experts
from support.toy import Recorder, toy_data, toy_module, toy_trainer
from support.vllm_imports import vllm_is_imported  # noqa: F401 (a fixture)
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from lightning_rlhf.callbacks import VLLMRollout
from lightning_rlhf.contracts.rollout import SamplingConfig
from lightning_rlhf.rollout.vllm import VLLMEngine
from lightning_rlhf.strategies import MegatronRLStrategy

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

PROMPTS = prompt_batch({"a": [5, 6, 7], "b": [9, 10, 11, 12, 13], "c": [20]})


@pytest.mark.parametrize(
    ("family", "expert_size"),
    [
        pytest.param("qwen3_moe", 64, id="qwen3"),
        pytest.param("qwen3_moe", 48, id="qwen3-padded"),  # vLLM's kernel takes multiples of 32
        # transformers calls its layers otherwise than files and vLLM do
        pytest.param("mixtral", 64, id="mixtral"),
        pytest.param("qwen2_moe", 64, id="qwen2", marks=pytest.mark.slow),
        pytest.param("glm4_moe", 64, id="glm4", marks=pytest.mark.slow),
        pytest.param("olmoe", 64, id="olmoe", marks=pytest.mark.slow),
        pytest.param("granitemoe", 64, id="granite", marks=pytest.mark.slow),
    ],
)
def test_log_probs_follow_every_push(
    tmp_path: Path, engines: list[VLLMEngine], family: ExpertFamily, expert_size: int
) -> None:
    """vLLM packs experts at the first load only: without more, a push has it sample from garbage, silently."""
    model = tiny_experts(family, expert_size=expert_size).eval()
    path = write_tiny_experts(tmp_path / "model", family, expert_size=expert_size)
    engine = VLLMEngine(path, max_model_len=64, kv_cache_bytes=2**25)
    engines.append(engine)

    def difference() -> float:
        engine.reset_prefix_cache()
        engine.weight_version = 0
        rollouts = engine.generate(PROMPTS, SamplingConfig(n=2, max_new_tokens=12), rl_step=0)
        return largest_difference(model, rollouts)

    def as_files_have_them() -> list[tuple[str, Tensor]]:
        model.save_pretrained(tmp_path / "next")
        one_by_one = load_file(tmp_path / "next" / "model.safetensors")
        assert family == "granitemoe" or any(".experts.3." in name for name in one_by_one)
        return sorted(one_by_one.items(), reverse=True)

    engine.load_weights(as_files_have_them())
    assert difference() < 1e-5
    perturb(model, seed=1, scale=0.3)
    assert difference() > 1e-2, "the weights hardly move: this test shows nothing"
    engine.load_weights(as_files_have_them())
    assert difference() < 1e-5
    for seed in (2, 3):
        perturb(model, seed=seed, scale=0.3)
        engine.load_weights(model.state_dict().items())  # all experts of a layer in one tensor
        assert difference() < 1e-5


def test_d06_a_routers_float32_bias_stays_float32_in_a_bfloat16_engine(
    tmp_path: Path, engines: list[VLLMEngine]
) -> None:
    """In bf16 the two largest would be equal, and another expert be chosen."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model = tiny_experts("glm4_moe").eval()
    bias = torch.tensor([1.0010, 1.0020, 0.5, 0.25])
    assert bias.bfloat16()[0] == bias.bfloat16()[1]
    engine = VLLMEngine(
        write_tiny_experts(tmp_path, "glm4_moe"), max_model_len=64, kv_cache_bytes=2**25, dtype="bfloat16"
    )
    engines.append(engine)
    for shift in (0.0, 0.125):
        with torch.no_grad():
            model.get_buffer(name).copy_(bias + shift)
        engine.load_weights(model.state_dict().items())
        held = engine.read_weights([name, "model.norm.weight"])
        assert held["model.norm.weight"].dtype is torch.bfloat16
        assert held[name].dtype is torch.float32
        assert torch.equal(held[name], bias + shift)


def test_weights_that_vllm_writes_past_its_loaders_are_refused_by_name(
    tmp_path: Path, engines: list[VLLMEngine]
) -> None:
    """During a reload they would be lost, and vLLM go on with the old ones, silently."""
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    model = GptOssForCausalLM(config)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    engine = VLLMEngine(tmp_path, max_model_len=64, kv_cache_bytes=2**25)
    engines.append(engine)
    with pytest.raises(ValueError, match=r"GptOssForCausalLM writes \[.*w13_weight.*past its own loaders"):
        engine.load_weights(model.state_dict().items())
    assert engine.weight_version is None


def _fit(root: Path, model: Path) -> list[dict[str, Any]]:
    recorder = Recorder()
    rollout = VLLMRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64, max_num_seqs=16, kv_cache_bytes=16 << 20)
    strategy = MegatronRLStrategy(expert_parallel_size=2)
    trainer = toy_trainer(root, callbacks=[recorder], rollout=rollout, strategy=strategy, devices=2)
    trainer.fit(toy_module(model, max_rl_steps=2), toy_data())
    return recorder.steps


def test_vllm_samples_from_the_experts_that_are_trained(tmp_path: Path) -> None:
    """Two steps on two ranks that share out the experts; each rank's vLLM has all of them."""
    model = write_tiny_experts(tmp_path / "model")
    for steps in run_distributed(_fit, 2, tmp_path, model, init_process_group=False, timeout=280.0):
        assert len(steps) == 2
        for step in steps:
            assert step["metrics"]["actor/mismatch_abs_max"] < 1e-5
            assert step["metrics"]["actor/expert_load_max"] > 1.0
        assert steps[0]["metrics"]["actor/grad_norm"] > 0
