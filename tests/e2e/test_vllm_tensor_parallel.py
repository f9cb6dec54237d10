"""One vLLM model over several ranks of the trainer: the samples of an engine on one rank, in every layout."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fork import run_distributed
from support.megatron_imports import megatron_is_imported  # noqa: F401 (a fixture)
from support.replay import RolloutRecorder, joined, samples_of
from support.rollout import largest_difference, naive_log_probs, perturb, prompt_batch
from support.tiny import tiny_model, write_tiny_model
from support.toy import Recorder, toy_data, toy_module, toy_trainer
from support.vllm_imports import vllm_is_imported  # noqa: F401 (a fixture)

from lightning_rlhf.callbacks import VLLMRollout
from lightning_rlhf.contracts.rollout import SamplingConfig
from lightning_rlhf.rollout.vllm import VLLMEngine
from lightning_rlhf.rollout.vllm_request import VLLMRequest
from lightning_rlhf.strategies import FSDP2RLStrategy, MegatronRLStrategy, UlyssesRLStrategy
from lightning_rlhf.types import PromptBatch, Rollouts
from lightning_rlhf.weights.receipt import SentSamples, check_read_back, sample_rows

LENGTH = 96
SAMPLING = SamplingConfig(n=2, max_new_tokens=6, temperature=0.8)
PROMPTS = (
    prompt_batch({"a": [5, 6, 7], "b": [9, 10, 11, 12, 13]}),
    prompt_batch({"c": [20], "long": [5 + (7 * place) % 50 for place in range(70)], "none": [5] * LENGTH}),
)
"""Of each rank."""


def _engine(path: Path, tensor_parallel_size: int) -> VLLMEngine:
    replica = dist.get_rank() // tensor_parallel_size
    return VLLMEngine(
        path, max_model_len=LENGTH, kv_cache_bytes=2**24, max_num_seqs=6, seed=42, replica_index=replica,
        tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip


def _push(engine: VLLMEngine, model: torch.nn.Module, *, version: int) -> None:
    engine.load_weights(model.state_dict().items())
    engine.reset_prefix_cache()
    engine.weight_version = version


def _rows(rollouts: Rollouts) -> dict[str, Any]:
    return {"samples": samples_of(rollouts), "finish_reasons": rollouts.finish_reasons}


def _rounds(engine: VLLMEngine, prompts: PromptBatch) -> list[dict[str, Any]]:
    """Rank 0 has three rollouts to ask for, rank 1 one, and both settings of their own."""
    found = []
    with engine.session():
        found.append(engine.generate(prompts, SAMPLING, rl_step=0))
        if dist.get_rank() == 0:
            short = SamplingConfig(max_new_tokens=2, temperature=0)
            found += [engine.generate(prompts, short, rl_step=step) for step in (0, 1)]
    return [_rows(rollouts) for rollouts in found]


def _at_the_engine(path: Path, *, tied: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    before = (dict(os.environ), torch.set_num_threads, torch.get_rng_state())
    engine = _engine(path, 2)
    after = (dict(os.environ), torch.set_num_threads, torch.get_rng_state())
    model = tiny_model(tied=tied).eval()
    _push(engine, model, version=0)
    engine.generate(PROMPTS[rank], SAMPLING, rl_step=0)  # fills the prefix cache
    perturb(model, seed=1)
    _push(engine, model, version=1)
    rollouts = engine.generate(PROMPTS[rank], SAMPLING, rl_step=0)
    own = [PROMPTS[rank].prompt_token_ids[0], [30, 31 + rank]]
    scores = engine.score(own, temperature=0.5)
    expected = [naive_log_probs(model, ids, temperature=0.5) for ids in own]
    result = {
        "fenced": before[:2] == after[:2] and bool(torch.equal(before[2], after[2])),
        "seed": engine.engine_seed,
        "skipped": engine.counters.skipped_prompts,
        "log_probs": largest_difference(model, rollouts, temperature=0.8),
        "score": max(abs(a - b) for x, y in zip(scores, expected, strict=True) for a, b in zip(x, y, strict=True)),
        "rounds": _rounds(engine, PROMPTS[rank]),
        "compared": _read_back(engine, model),
        **_errors(engine, rank),
        **_failure_in_sampling(engine, rank),
    }
    engine.shutdown()
    count = torch.ones(1)
    dist.all_reduce(count)  # the trainer's own group lives on
    alone = _engine(path, 1)
    _push(alone, model, version=1)
    result |= {"ranks": int(count), "alone": _rounds(alone, PROMPTS[rank]), "seed_alone": alone.engine_seed}
    alone.shutdown()
    return result


def _read_back(engine: VLLMEngine, model: torch.nn.Module) -> list[str]:
    """Names whose rows are the model's; another value in a rank's row is found."""
    sent = SentSamples()
    for _ in sent.watch(model.state_dict().items()):
        pass
    rows = engine.read_rows(list(sent.samples))
    held = {name: sample_rows(part) for name, part in rows.items()}
    check_read_back(sent.samples, held, version=1, where="here")
    wrong = {name: (values + 1, first) for name, (values, first) in held.items()}
    with pytest.raises(RuntimeError, match="differs from the trainer's by up to 1"):
        check_read_back(sent.samples, wrong, version=1, where="here")
    return sorted(name for name, (values, _) in held.items() if values.numel() == 32)


def _errors(engine: VLLMEngine, rank: int) -> dict[str, str]:
    """What each rank is told when one of them goes its own way."""
    prompts = PROMPTS[rank]
    errors = {}
    with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
        _fail_on_rank_1(engine, rank)
    errors["failed"] = str(caught.value)
    engine.weight_version = 1 + rank
    with pytest.raises(RuntimeError) as caught:
        engine.generate(prompts, SAMPLING, rl_step=0)
    errors["versions"] = str(caught.value)
    engine.weight_version = 1
    with pytest.raises(RuntimeError) as caught:
        engine.score([[5, 6]], temperature=1.0 + rank)
    errors["temperatures"] = str(caught.value)
    step = engine._vllm.step
    for what in ("pause", "abort"):
        engine._vllm.step = getattr(engine, what)
        with pytest.raises(RuntimeError) as caught:
            engine.generate(prompts, SAMPLING, rl_step=0)
        errors[what] = str(caught.value)
    engine._vllm.step = step
    take = VLLMRequest.take
    if rank == 1:
        VLLMRequest.take = _taking_another_id  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        engine.generate(prompts, SAMPLING, rl_step=0)
    errors["different"] = str(caught.value)
    VLLMRequest.take = take  # type: ignore[method-assign]
    return errors


def _failure_in_sampling(engine: VLLMEngine, rank: int) -> dict[str, Any]:
    """The last thing that an engine does: rank 1 fails at the third token, while rank 0 waits for its share of it."""
    step, steps = engine._vllm.step, itertools.count()

    def failing() -> Any:
        if next(steps) == 2:
            raise MemoryError("no room on rank 1")
        return step()

    if rank == 1:
        engine._vllm.step = failing
    begun = time.monotonic()
    with pytest.raises((RuntimeError, MemoryError)) as caught, engine.session():
        engine.generate(PROMPTS[rank], SAMPLING, rl_step=0)
    engine._vllm.step = step
    return {"seconds": time.monotonic() - begun, "in_sampling": f"{caught.type.__name__} {caught.value}"}


def _fail_on_rank_1(engine: VLLMEngine, rank: int) -> None:
    with engine.session():
        if rank == 1:
            raise ZeroDivisionError("of rank 1")
        engine.generate(PROMPTS[rank], SAMPLING, rl_step=0)


def _taking_another_id(request: VLLMRequest, output: Any, *, version: int) -> bool:
    request.token_ids += [7]
    return bool(output.finished)


@pytest.mark.parametrize("tied", [pytest.param(False, id="untied"), pytest.param(True, id="tied")])
def test_two_ranks_sample_what_one_samples_and_stay_in_step(tmp_path: Path, tied: bool) -> None:
    path = write_tiny_model(tmp_path / "tiny", tied=tied)
    ranks = run_distributed(_at_the_engine, 2, path, tied=tied, timeout=280.0)
    for rank, result in enumerate(ranks):
        assert result["fenced"]
        assert result["ranks"] == 2
        assert (result["seed"], result["seed_alone"]) == (42, 42 + rank)  # E01: equal within a replica alone
        assert result["skipped"] == 2 * rank  # counted by the rank whose prompt it is, once a rollout
        assert result["log_probs"] < 1e-5
        assert result["score"] < 1e-5
        assert len(result["rounds"]) == (1 if rank else 3)
        assert result["rounds"] == result["alone"]
        assert {"model.embed_tokens.weight", "lm_head.weight"} == set(result["compared"])
        assert ("of rank 1" if rank else "Rank 1 of the 2 that share one vLLM") in result["failed"]
        assert "weights of versions [1, 2]" in result["versions"]
        assert "temperatures [1.0, 2.0]" in result["temperatures"]
        for what in ("pause", "abort"):
            assert f"{what}() while 2 ranks" in result[what]
            assert "mode='server', tensor_parallel_size=2" in result[what]
        assert "sampled different ids" in result["different"]
        assert result["seconds"] < 20.0, "the others have waited for the group's timeout"
    assert ranks[0]["in_sampling"].startswith("RuntimeError Rank 1 of the 2 that share one vLLM")
    assert ranks[0]["in_sampling"].endswith("MemoryError: no room on rank 1")
    assert ranks[1]["in_sampling"] == "MemoryError no room on rank 1"


def _fit(root: Path, model: Path, strategy: Any, devices: int, tensor_parallel_size: int) -> dict[str, Any]:
    recorder, rollouts = Recorder(), RolloutRecorder()
    rollout = VLLMRollout(
        num_rollouts=4, max_new_tokens=8, max_model_len=64, max_num_seqs=16, kv_cache_bytes=16 << 20,
        tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip
    trainer = toy_trainer(root, callbacks=[recorder, rollouts], rollout=rollout, strategy=strategy, devices=devices)
    trainer.fit(toy_module(model, max_rl_steps=2), toy_data(), ckpt_path=None)
    return {"steps": recorder.steps, "rollouts": rollouts.rollouts}


def _ranks(root: Path, model: Path, strategy: Any, devices: int, size: int) -> Sequence[dict[str, Any]]:
    return run_distributed(_fit, devices, root, model, strategy, devices, size, init_process_group=False, timeout=280.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Any]]:
    """One process without sharing, and its model, tied or not."""

    @cache
    def run(tied: bool) -> dict[str, Any]:
        root = tmp_path_factory.mktemp("plain")
        model = write_tiny_model(root / "tiny", family="llama", tied=tied)
        return {"model": model, **_ranks(root, model, "auto", 1, 1)[0]}

    return run


FSDP2, TP2 = FSDP2RLStrategy(), MegatronRLStrategy(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("strategy", "devices", "owners", "tied"),
    [
        # owners: ranks whose rows together are the step's
        pytest.param(FSDP2, 2, (0, 1), False, id="fsdp2-untied"),
        pytest.param(TP2, 2, (0,), True, id="megatron-tp2-tied"),
        pytest.param(FSDP2, 4, (0, 1, 2, 3), False, id="fsdp2-two-replicas"),
        pytest.param(FSDP2, 2, (0, 1), True, id="fsdp2-tied", marks=pytest.mark.slow),
        pytest.param(TP2, 2, (1,), False, id="megatron-tp2-untied", marks=pytest.mark.slow),
        # its stages are ranks 0 and 2, 1 and 3: each vLLM has ranks of two of them
        pytest.param(
            MegatronRLStrategy(pipeline_parallel_size=2),
            4,
            (0, 1),
            False,
            id="megatron-pp2-dp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(UlyssesRLStrategy(sp_size=2), 2, (0,), False, id="ulysses-sp2", marks=pytest.mark.slow),
    ],
)
def test_a_run_samples_and_learns_as_one_process_does(
    tmp_path: Path,
    plain: Callable[[bool], dict[str, Any]],
    strategy: Any,
    devices: int,
    owners: tuple[int, ...],
    tied: bool,
) -> None:
    expected = plain(tied)
    ranks = _ranks(tmp_path, expected["model"], strategy, devices, 2)
    for step, rollouts in enumerate(joined([ranks[rank]["rollouts"] for rank in owners])):
        # request seeds do not depend on the layout, and vLLM's shares add up to its whole
        assert samples_of(rollouts) == samples_of(expected["rollouts"][step]), step
    for rank in ranks:
        for index, step in enumerate(rank["steps"]):
            # sampled with the weights that the trainer has now
            assert step["metrics"]["actor/mismatch_abs_max"] < 1e-5
            assert step["metrics"]["sync/tensors_compared"] > 0
            for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
                assert step["metrics"][name] == pytest.approx(expected["steps"][index]["metrics"][name], abs=1e-4), name
