from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_model, write_tiny_model
from torch import nn

from lightning_rlhf.cli import main
from lightning_rlhf.cli.plan import human_bytes

PROMPT = "what is 1+1?"  # a token each character, and <user>, <eos>, <assistant> around it
PROMPT_TOKENS = len(PROMPT) + 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    write_tiny_model(folder / "model")
    for weights in (folder / "model").glob("*.safetensors"):
        weights.unlink()  # config and tokenizer are all that a plan may read
    rows = [{"prompt": PROMPT, "answer": "2"} for _ in range(10)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _arguments(folder: Path, *more: str) -> list[str]:
    chosen = [argument for argument in more if argument.startswith("experiment=")]
    more = tuple(argument for argument in more if argument not in chosen)
    return [
        *(chosen or ["experiment=grpo-tiny-1n1r-auto"]),
        f"model.path={folder / 'model'}",
        "data=jsonl",
        f"data.source.path={folder / 'data.jsonl'}",
        "reward=gsm8k",
        "strategy=fsdp2_rl",
        "trainer.devices=2",
        "data.prompts_per_step=4",
        "rollout.num_rollouts=4",
        "rollout.max_new_tokens=8",
        *more,
    ]


def _plan(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> dict[str, Any]:
    status = main.main(["plan", "--json", *_arguments(folder, *more)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    plan: dict[str, Any] = json.loads(captured.out)
    return plan


def _refusal(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> str:
    assert main.main(["plan", *_arguments(folder, *more)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lightning-rlhf plan: ")
    return captured.err


def test_the_numbers_of_a_run(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    plan = _plan(capsys, folder)
    assert plan["processes"] == {
        "world_size": 2,
        "data_parallel_size": 2,
        "axes": {"dp_shard": 2, "dp_replicate": 1},
    }
    assert plan["rl_step"] == {"prompts": 4, "rollouts": 16, "mini_batches": 1, "epochs": 1, "optimizer_steps": 1}
    assert plan["per_rank"] == {
        "prompts": 2,
        "rollouts": 8,
        "rollouts_per_mini_batch": 8,
        "micro_batches_per_mini_batch": 1,
        "micro_batches_per_rl_step": 1,
        "tokens_in_the_largest_micro_batch": 8 * (PROMPT_TOKENS + 8),
    }
    assert plan["denominators"] == {"aggregation": "token-mean", "sequences": 16, "response_tokens_at_most": 128}
    # 10 prompts make 2 steps of 4, in one epoch; the experiment's max_rl_steps is 4
    assert plan["run"] == {"prompts_in_the_data": 10, "rl_steps": 2, "optimizer_steps": 2, "rollouts": 32}
    assert plan["weight_pushes"] == {"per_rl_step": 1, "that_nobody_reads": 0}
    assert plan["notes"] == []


def test_static_and_dynamic_micro_batches(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    static = _plan(capsys, folder, "algorithm.micro_batch_size=3")
    assert static["micro_batches"]["cut"] == "by count (static)"
    assert static["per_rank"]["micro_batches_per_mini_batch"] == 3
    row = PROMPT_TOKENS + 8
    dynamic = _plan(capsys, folder, f"algorithm.max_tokens_per_micro_batch={2 * row + 1}")
    assert dynamic["micro_batches"]["cut"] == "by tokens (dynamic)"
    assert dynamic["micro_batches"]["prompt_tokens_longest"] == PROMPT_TOKENS
    assert dynamic["per_rank"]["micro_batches_per_mini_batch"] == 4
    assert dynamic["per_rank"]["tokens_in_the_largest_micro_batch"] == 2 * row


def test_pushes_that_nobody_reads(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    mini_batches = ["algorithm.mini_batch_size=4", "algorithm.num_epochs=2"]
    plan = _plan(capsys, folder, *mini_batches)
    assert plan["rl_step"]["optimizer_steps"] == 8
    assert plan["weight_pushes"] == {"per_rl_step": 8, "that_nobody_reads": 7}
    assert any("weight_sync.every=rollout leaves them out" in note for note in plan["notes"])
    quiet = _plan(capsys, folder, *mini_batches, "weight_sync.every=rollout")
    assert quiet["weight_pushes"] == {"per_rl_step": 1, "that_nobody_reads": 0}


def test_memory_and_traffic(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    plan = _plan(capsys, folder)
    memory, traffic = plan["memory_per_rank"], plan["communication_per_rl_step"]
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")
    parameters = memory["rollout_weights"] // 4
    assert memory["parameters"] == 4 * -(-parameters // 2)
    assert memory["optimizer_state"] == 2 * memory["parameters"]
    assert memory["reference"] == 0
    # 2 layers x 2 (keys, values) x 1 head x 32, fp32, for 8 responses on a rank
    assert memory["kv_cache"] == 4 * 2 * 2 * 32 * 8 * (PROMPT_TOKENS + 8)
    assert traffic["all_gather"] == 2 * 4 * parameters // 2
    assert traffic["reduce_scatter"] == 4 * parameters // 2
    with_reference = _plan(capsys, folder, "algorithm.kl_coef=0.1")
    assert with_reference["memory_per_rank"]["reference"] == memory["parameters"]
    assert with_reference["communication_per_rl_step"]["all_gather"] == 3 * 4 * parameters // 2


def test_where_vllm_takes_its_memory(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    vllm = ["rollout=vllm", "+rollout.kv_cache_bytes=1000000"]
    here = _plan(capsys, folder, *vllm)["memory_per_rank"]
    assert here["kv_cache"] == 1000000
    served = _plan(capsys, folder, *vllm, "+rollout.mode=server", "+rollout.replicas=2")
    elsewhere = served["memory_per_rank"]
    assert (elsewhere["rollout_weights"], elsewhere["kv_cache"]) == (0, 0)
    assert here["total"] - elsewhere["total"] == here["rollout_weights"] + 1000000
    told = f"each of 2 replica(s) takes {here['rollout_weights'] + 1000000} bytes"
    assert any(told in note for note in served["notes"])
    # on a CPU a tied head is packed beside the embedding: 64 ids x 64 numbers in fp32
    write_tiny_model(tmp_path / "tied", tied=True)
    tied = f"model.path={tmp_path / 'tied'}"
    more = _plan(capsys, folder, *vllm, tied)["memory_per_rank"]["rollout_weights"]
    assert more - _plan(capsys, folder, tied)["memory_per_rank"]["rollout_weights"] == 4 * 64 * 64
    assert (
        here["rollout_weights"] == _plan(capsys, folder)["memory_per_rank"]["rollout_weights"]
    )  # has a head of its own


def test_an_adapter_is_counted_and_needs_no_second_model(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    reference = "algorithm.kl_coef=0.1"
    lora = ["+algorithm.lora._target_=lightning_rlhf.LoRAConfig", "+algorithm.lora.rank=4"]
    full, plan = _plan(capsys, folder, reference), _plan(capsys, folder, reference, *lora)
    layers = dict(tiny_model().named_modules())
    del layers["lm_head"]
    linear = [layer for layer in layers.values() if isinstance(layer, nn.Linear)]
    adapter = sum(4 * (layer.in_features + layer.out_features) for layer in linear)
    assert plan["memory_per_rank"]["optimizer_state"] == 8 * adapter // 2 < full["memory_per_rank"]["optimizer_state"]
    assert plan["memory_per_rank"]["reference"] == 0 < full["memory_per_rank"]["reference"]
    assert "algorithm.lora: " in _refusal(capsys, folder, lora[0], "+algorithm.lora.target_modules=[lm_head]")


def test_a_critic_and_traffic_under_megatron(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    layout = ["strategy=megatron_rl", "strategy.tensor_parallel_size=1", "strategy.pipeline_parallel_size=2"]
    actor = _plan(capsys, folder, *layout)
    both = _plan(capsys, folder, "experiment=ppo-tiny-1n1r-auto", *layout)
    memory = both["memory_per_rank"]
    # fp32 parameters, their buffer of gradients, two moments
    assert memory["critic_gradients"] == memory["critic_parameters"] == memory["critic_optimizer_state"] // 2
    assert 0 < memory["critic_parameters"] <= memory["parameters"]
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")
    traffic = actor["communication_per_rl_step"]
    # 16 rollouts on the one data-parallel rank, states of 64 fp32 numbers, from the stage before
    assert traffic["pipeline"] == 16 * (PROMPT_TOKENS + 8) * 64 * 4
    assert traffic["tensor"] == traffic["context"] == traffic["expert"] == traffic["gradients"] == 0
    assert any(f"rollouts of {PROMPT_TOKENS + 8} tokens" in note for note in actor["notes"])
    # the critic is trained on as many tokens, and scores them once before
    assert both["communication_per_rl_step"]["pipeline"] == 3 * traffic["pipeline"]


def test_shared_prompts_are_counted(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    plan = _plan(capsys, folder, "strategy.share_prompts=true")
    # 8 responses to 2 prompts on a rank
    assert plan["per_rank"]["tokens_in_the_largest_micro_batch"] == 2 * PROMPT_TOKENS + 8 * 8


def test_a_critic_is_counted(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    actor = _plan(capsys, folder, "algorithm.mini_batch_size=8")
    ppo = ["experiment=ppo-tiny-1n1r-auto", "algorithm.mini_batch_size=8", "algorithm.critic_mini_batch_size=4"]
    plan = _plan(capsys, folder, *ppo)
    assert plan["rl_step"]["optimizer_steps"] == 2
    assert plan["rl_step"]["critic_optimizer_steps"] == 4
    memory = plan["memory_per_rank"]
    # the tiny model's head of 64 x 64 is its own; the critic has one row
    parameters = memory["rollout_weights"] // 4 - 64 * 64 + 64
    assert memory["critic_parameters"] == 4 * -(-parameters // 2)
    assert memory["critic_optimizer_state"] == 2 * memory["critic_parameters"]
    traffic, before = plan["communication_per_rl_step"], actor["communication_per_rl_step"]
    assert traffic["reduce_scatter"] - before["reduce_scatter"] == 4 * 4 * parameters // 2
    # 4 forward-backwards, and one pass for the values before them
    assert traffic["all_gather"] - before["all_gather"] == (4 * 2 + 1) * 4 * parameters // 2
    assert traffic["weight_push_all_gather"] == before["weight_push_all_gather"]
    assert "mini_batch_size=3" in _refusal(capsys, folder, ppo[0], "algorithm.critic_mini_batch_size=3")


def test_the_table_shows_the_same(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main.main(["plan", *_arguments(folder)]) == 0
    out = capsys.readouterr().out
    for text in ("rl step", "optimizer steps", "denominators", "kv cache", "KiB", "that nobody reads"):
        assert text in out


def test_what_is_not_known_is_said(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    plan = _plan(capsys, folder, f"model.path={tmp_path.name}/nobody", "algorithm.max_tokens_per_micro_batch=64")
    assert plan["memory_per_rank"] is None
    assert plan["per_rank"]["micro_batches_per_mini_batch"] is None
    assert plan["run"]["rl_steps"] == 4
    assert len(plan["notes"]) == 2


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (["trainer.devices=3", "rollout.num_rollouts=2"], ["prompts_per_step=4", "3 data-parallel ranks"]),
        (["algorithm.mini_batch_size=4", "algorithm.micro_batch_size=8"], ["micro_batch_size=8", "= 2 rollouts"]),
        (
            ["algorithm.mini_batch_size=2", "trainer.devices=4"],
            ["mini_batch_size=2", "4 data-parallel ranks without a rollout"],
        ),
        (
            ["data.prompts_per_step=8", "rollout.num_rollouts=1", "algorithm.mini_batch_size=3"],
            ["mini_batch_size=3", "8 rollouts"],
        ),
        (["algorithm.mini_batch_size=32"], ["mini_batch_size=32", "16 rollouts"]),
        (["data.prompts_per_step=12"], ["10 prompts", "12"]),
        ([f"algorithm.max_tokens_per_micro_batch={PROMPT_TOKENS}"], [f"at least {PROMPT_TOKENS + 8}"]),
    ],
    ids=["ranks", "micro", "mini-ranks", "mini-divides", "mini-larger", "data", "budget"],
)
def test_g02_sizes_that_do_not_fit_are_refused_with_their_numbers(
    capsys: pytest.CaptureFixture[str], folder: Path, overrides: list[str], numbers: list[str]
) -> None:
    message = _refusal(capsys, folder, *overrides)
    for number in numbers:
        assert number in message


@pytest.mark.parametrize("command", ["plan", "train"])
def test_g03_a_layout_that_does_not_fit_is_refused_by_each_command(
    capsys: pytest.CaptureFixture[str], folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-rlhf"])
    for overrides, message in (
        (["strategy.dp_shard_size=3"], "strategy: dp_shard_size=3 x dp_replicate_size=1 does not fit 2 process(es)"),
        (
            ["strategy=ulysses_rl", "strategy.sp_size=4", "trainer.devices=4"],
            "strategy.sp_size: sp_size=4 does not fit a model with 2 attention heads and 1 key-value heads",
        ),
    ):
        arguments = [command, *_arguments(folder, *overrides)]
        if command == "plan":
            assert main.main(arguments) == 2
        else:
            with pytest.raises(SystemExit) as leave:
                main.main(arguments)
            assert leave.value.code == 2
        assert f"lightning-rlhf {command}: {message}" in capsys.readouterr().err


def test_an_unknown_key_is_refused(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert "did you mean algorithm.kl_coef?" in _refusal(capsys, folder, "algorithm.kl_coeff=1")


def test_a_response_that_may_break_the_budget_is_noted(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    plan = _plan(capsys, folder, f"algorithm.max_tokens_per_micro_batch={PROMPT_TOKENS + 4}")
    assert any(f"is below {PROMPT_TOKENS + 8}" in note for note in plan["notes"])


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_bytes_for_people(size: int, text: str) -> None:
    assert human_bytes(size) == text
