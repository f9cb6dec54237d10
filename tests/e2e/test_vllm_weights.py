"""Pushes into real vLLM: tied and untied heads, any order, reused buffers, padded vocabularies, bf16, two ranks."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from support.fork import run_distributed
from support.rollout import largest_difference, naive_log_probs, perturb, prompt_batch
from support.tiny import Family, tiny_model, write_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.contracts.rollout import SamplingConfig
from lightning_rlhf.rollout.vllm import VLLMEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

PROMPTS = prompt_batch({"a": [5, 6, 7], "b": [9, 10, 11, 12, 13], "c": [20]})
SAMPLING = SamplingConfig(n=2, max_new_tokens=12)


def push(engine: VLLMEngine, named_tensors: Iterator[tuple[str, Tensor]], *, version: int = 0) -> None:
    engine.load_weights(named_tensors)
    engine.reset_prefix_cache()
    engine.weight_version = version


def difference(engine: VLLMEngine, model: PreTrainedModel) -> float:
    return largest_difference(model, engine.generate(PROMPTS, SAMPLING, rl_step=0))


def through_one_buffer(named_tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """As a transport that receives every tensor into the same memory."""
    buffer = torch.empty(max(tensor.numel() for _, tensor in named_tensors))
    for name, tensor in named_tensors:
        view = buffer[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        yield name, view
        buffer.fill_(float("nan"))


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", True), ("llama", False)])
def test_d04_log_probs_and_tensors_follow_every_push(
    tmp_path: Path, engines: list[VLLMEngine], family: Family, tied: bool
) -> None:
    model = tiny_model(family=family, tied=tied).eval()
    engine = VLLMEngine(write_tiny_model(tmp_path, family=family, tied=tied), max_model_len=64, kv_cache_bytes=2**25)
    engines.append(engine)

    seeds = itertools.count()

    def state(*, without_head: bool = False) -> list[tuple[str, Tensor]]:
        perturb(model, seed=next(seeds), scale=0.3)
        skipped = "lm_head.weight" if without_head else ""
        return [(name, tensor) for name, tensor in model.state_dict().items() if name != skipped]

    push(engine, iter(state()))
    assert difference(engine, model) < 1e-5
    push(engine, iter(state(without_head=tied)))
    assert difference(engine, model) < 1e-5
    push(engine, reversed(state()))
    assert difference(engine, model) < 1e-5
    by_kind = sorted(state(), key=lambda item: item[0].rpartition("layers.")[2].lstrip("0123456789"))
    push(engine, iter(by_kind))  # q_proj of all layers, later k_proj of all layers
    assert difference(engine, model) < 1e-5
    push(engine, through_one_buffer(by_kind))
    assert difference(engine, model) < 1e-5
    held, own = engine.read_weights([*model.state_dict(), "unknown"]), model.state_dict()
    assert held.keys() == {name for name in own if "norm" in name or "embed" in name or "lm_head" in name}
    assert all(torch.equal(held[name], own[name]) for name in held)
    state()
    assert difference(engine, model) > 1e-2, "the weights hardly move: this test shows nothing"


def test_e10_vocabulary_that_vllm_pads(tmp_path: Path, engines: list[VLLMEngine]) -> None:
    model = tiny_model().eval()
    model.resize_token_embeddings(75, mean_resizing=False)
    model.save_pretrained(tmp_path)
    write_tiny_model(tmp_path / "tokenizer")
    AutoTokenizer.from_pretrained(tmp_path / "tokenizer").save_pretrained(tmp_path)
    with torch.no_grad():
        model.lm_head.weight[64:].zero_()
    engine = VLLMEngine(tmp_path, max_model_len=64, kv_cache_bytes=2**25)
    engines.append(engine)
    push(engine, through_one_buffer(list(model.state_dict().items())))
    ids = [5, 6, 7, 8, 9]
    assert engine.score([ids])[0] == pytest.approx(naive_log_probs(model, ids), abs=1e-5)
    held = engine.read_weights(["lm_head.weight", "model.embed_tokens.weight"])
    assert all(torch.equal(held[name], model.state_dict()[name]) for name in held)
    assert len(held) == 2

    # Eleven ids that the tokenizer does not have: samples with one of them are dropped, the others stay.
    sampling = SamplingConfig(n=20, max_new_tokens=6)
    rollouts = engine.generate(PROMPTS, sampling, rl_step=0)
    assert 0 < engine.counters.dropped_samples < 60
    assert rollouts.finish_reasons.count("skipped") == engine.counters.dropped_samples
    assert int(rollouts.tokens.max()) < 64


def test_bfloat16_takes_fp32_weights(tmp_path: Path, engines: list[VLLMEngine]) -> None:
    model = tiny_model(tied=True).eval()
    engine = VLLMEngine(write_tiny_model(tmp_path, tied=True), max_model_len=64, kv_cache_bytes=2**25, dtype="bfloat16")
    engines.append(engine)
    push(engine, iter(model.state_dict().items()))
    held = engine.read_weights(["model.norm.weight"])["model.norm.weight"]
    assert torch.equal(held, model.model.norm.weight.detach().bfloat16())
    assert difference(engine, model.bfloat16()) < 0.2


def test_engines_one_after_the_other(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    for seed in range(2):
        engine = VLLMEngine(path, max_model_len=64, kv_cache_bytes=2**25)
        model = tiny_model(seed=seed).eval()
        push(engine, iter(model.state_dict().items()))
        assert difference(engine, model) < 1e-5
        if seed == 0:
            engine.shutdown()
            engine.shutdown()
            with pytest.raises(RuntimeError, match="no valid weights"):
                engine.generate(PROMPTS, SAMPLING, rl_step=0)
            with pytest.raises(RuntimeError, match="was shut down"):
                engine.load_weights(model.state_dict().items())
    del engine  # without a shutdown: the tests that follow need the process as much as those before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"engine_kwargs": {"no_such_argument": 1}}, TypeError, "no_such_argument"),
        ({"engine_kwargs": {"max_num_seqs": 3}}, ValueError, "max_num_seqs"),
        ({"max_model_len": 513}, ValueError, "512 positions"),
        ({"dtype": "float16"}, ValueError, "float16"),
        ({"kv_cache_bytes": 2**12}, ValueError, "kv_cache_bytes"),
    ],
)
def test_arguments_are_refused_by_name(
    tmp_path: Path, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    path = write_tiny_model(tmp_path)
    with pytest.raises(error, match=message):
        VLLMEngine(path, **{"max_model_len": 64, "kv_cache_bytes": 2**25, **arguments})  # type: ignore[arg-type]
    assert not dist.is_initialized()


def all_reduced_ones() -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


@pytest.mark.parametrize("group_ends_first", [False, True])
def test_ranks_of_a_group_have_an_engine_each_and_keep_their_group(tmp_path: Path, group_ends_first: bool) -> None:
    path = write_tiny_model(tmp_path, tied=True)
    prompts = {"a": [5, 6, 7], "b": [9, 10]}

    def build(rank: int) -> VLLMEngine:
        engine = VLLMEngine(path, max_model_len=64, kv_cache_bytes=2**25, replica_index=rank)
        push(engine, iter(tiny_model(tied=True).state_dict().items()))
        return engine

    def rank_main() -> tuple[list[str], int]:
        group, rank = dist.group.WORLD, dist.get_rank()
        engine = build(rank)
        seed = engine.engine_seed
        uid = "ab"[rank]
        mine = prompt_batch({uid: prompts[uid]})
        responses = engine.generate(mine, SAMPLING, rl_step=0).responses
        assert all_reduced_ones() == 2.0
        if group_ends_first:
            dist.destroy_process_group()
            assert engine.generate(mine, SAMPLING, rl_step=0).responses == responses
            engine.shutdown()
            return responses, seed
        if rank == 0:
            engine.shutdown()
        del engine
        gc.collect()
        assert dist.group.WORLD is group
        assert all_reduced_ones() == 2.0
        return responses, seed

    def alone() -> list[str]:
        return build(0).generate(prompt_batch(prompts), SAMPLING, rl_step=0).responses

    results = run_distributed(rank_main, 2, timeout=120)
    assert [seed for _, seed in results] == [0, 1]
    if not group_ends_first:
        expected = run_distributed(alone, 1, init_process_group=False, timeout=120)[0]
        assert results[0][0] + results[1][0] == expected  # E01: whichever rank samples them


@pytest.mark.slow
def test_smollm2_after_a_push_has_hfs_log_probs(smollm2: Path, engines: list[VLLMEngine]) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    engine = VLLMEngine(smollm2, max_model_len=256, kv_cache_bytes=2**28)
    engines.append(engine)
    tokenizer = engine.directory.tokenizer
    questions = {f"What is {n} + {n + 3}?": tokenizer(f"What is {n} + {n + 3}?").input_ids for n in range(4)}
    prompts, sampling = prompt_batch(questions), SamplingConfig(n=2, max_new_tokens=24)
    push(engine, iter(model.state_dict().items()))
    assert largest_difference(model, engine.generate(prompts, sampling, rl_step=0)) < 1e-4
    before = naive_log_probs(model, prompts.prompt_token_ids[0])
    perturb(model, seed=5, scale=0.05)
    assert (
        max(abs(a - b) for a, b in zip(before, naive_log_probs(model, prompts.prompt_token_ids[0]), strict=True)) > 0.1
    )
    push(engine, iter(model.state_dict().items()), version=1)
    rollouts = engine.generate(prompts, sampling, rl_step=1)
    assert largest_difference(model, rollouts) < 1e-4
    assert set(rollouts.token_versions[rollouts.response_mask].tolist()) == {1}
