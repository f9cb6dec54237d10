"""Real vLLM on a tiny model: what it samples, how it is controlled. One engine serves the whole file."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from support.rollout import (
    largest_difference,
    naive_log_probs,
    perturb,
    prompt_batch,
    response_ids,
    response_log_probs,
    row_ids,
)
from support.tiny import CHARACTERS, EOS_ID, SPECIAL, VOCAB_SIZE, tiny_model, write_tiny_model

from lightning_rlhf.contracts.rollout import Guide, SamplingConfig
from lightning_rlhf.rollout.hf import HFReferenceEngine, sampling_log_probs
from lightning_rlhf.rollout.responses import RolloutCounters
from lightning_rlhf.rollout.vllm import VLLMEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

MAX_LENGTH = 128
PROMPTS = prompt_batch({"a": [5, 6, 7], "b": [9, 10, 11, 12, 13], "c": [20]})
LONG = prompt_batch({"long": [5 + (7 * place) % 50 for place in range(100)]})
"""Three whole blocks of the prefix cache and a part of one."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VLLMEngine, dict[str, object]]]:
    """The engine, and what the process was like before and after it was built."""
    path = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    torch.manual_seed(3)
    before = (dict(os.environ), torch.get_rng_state(), torch.set_num_threads, torch.get_num_threads())
    built = VLLMEngine(path, max_model_len=MAX_LENGTH, kv_cache_bytes=2**25, seed=42, replica_index=3)
    after = (dict(os.environ), torch.get_rng_state(), torch.set_num_threads, torch.get_num_threads())
    yield built, {"before": before, "after": after}
    built.shutdown()


@pytest.fixture
def engine(shared: tuple[VLLMEngine, dict[str, object]]) -> VLLMEngine:
    """The engine with the weights of ``tiny_model()`` as version 0."""
    built = shared[0]
    built.counters = RolloutCounters()
    push(built, tiny_model(), version=0)
    return built


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model().eval()


def push(engine: VLLMEngine, model: torch.nn.Module, *, version: int) -> None:
    engine.load_weights(model.state_dict().items())
    engine.reset_prefix_cache()
    engine.weight_version = version


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_log_probs_are_hfs_at_the_sampling_temperature(
    engine: VLLMEngine, model: PreTrainedModel, temperature: float
) -> None:
    sampling = SamplingConfig(n=4, max_new_tokens=24, temperature=temperature)
    rollouts = engine.generate(PROMPTS, sampling, rl_step=0)
    assert largest_difference(model, rollouts, temperature=temperature or 1.0) < 1e-5
    assert rollouts.temperature == (temperature or 1.0)
    assert rollouts.uids == [uid for uid in "abc" for _ in range(4)]
    assert rollouts.sample_indices == [0, 1, 2, 3] * 3
    assert set(rollouts.token_versions[rollouts.response_mask].tolist()) == {0}


def test_greedy_says_what_the_reference_engine_says(engine: VLLMEngine) -> None:
    reference = HFReferenceEngine(engine.directory.path, max_model_len=MAX_LENGTH)
    reference.load_weights(tiny_model().state_dict().items())
    reference.weight_version = 0
    sampling = SamplingConfig(max_new_tokens=24, temperature=0)
    own, expected = (one.generate(PROMPTS, sampling, rl_step=0) for one in (engine, reference))
    assert own.tokens.tolist() == expected.tokens.tolist()
    assert own.responses == expected.responses
    assert own.finish_reasons == expected.finish_reasons


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.8}])
def test_log_probs_are_those_of_the_filtered_distribution(
    engine: VLLMEngine, model: PreTrainedModel, filters: dict[str, float]
) -> None:
    sampling = SamplingConfig(n=2, max_new_tokens=12, temperature=0.7, **filters)  # type: ignore[arg-type]
    rollouts = engine.generate(PROMPTS, sampling, rl_step=0)
    for row in range(len(rollouts)):
        ids, own = row_ids(rollouts, row), response_log_probs(rollouts, row)
        with torch.no_grad():
            expected = sampling_log_probs(model(torch.tensor([ids])).logits[0], sampling)
        first = len(ids) - len(own)
        for place, value in enumerate(own, start=first):
            assert value == pytest.approx(float(expected[place - 1, ids[place]]), abs=2e-5)


def test_e01_samples_depend_on_seed_step_uid_and_index_alone(engine: VLLMEngine) -> None:
    assert engine.engine_seed == 45  # of replica 3; those of 0, 1 and 2 are 42, 43 and 44
    sampling = SamplingConfig(n=4, max_new_tokens=8, seed=42)

    def sample(prompts: dict[str, list[int]], config: SamplingConfig = sampling, step: int = 0) -> list[str]:
        return engine.generate(prompt_batch(prompts), config, rl_step=step).responses

    alone = sample({"a": [5, 6, 7]})
    assert len(set(alone)) > 1
    assert sample({"a": [5, 6, 7]}) == alone
    assert sample({"b": [9, 10], "a": [5, 6, 7]})[4:] == alone
    assert sample({"a": [5, 6, 7]}, SamplingConfig(n=2, max_new_tokens=8, seed=42)) == alone[:2]
    assert sample({"a": [5, 6, 7]}, SamplingConfig(n=4, max_new_tokens=8, seed=43)) != alone
    assert sample({"a": [5, 6, 7]}, step=1) != alone
    assert sample({"other": [5, 6, 7]}) != alone


def test_e03_response_is_cut_to_the_room_and_long_prompts_are_skipped(engine: VLLMEngine) -> None:
    prompts = prompt_batch({"2 left": [5] * (MAX_LENGTH - 2), "0 left": [6] * MAX_LENGTH, "long": [7] * 200, "ok": [8]})
    rollouts = engine.generate(prompts, SamplingConfig(n=2, max_new_tokens=8, temperature=0), rl_step=0)
    assert rollouts.uids == [uid for uid in prompts.uids for _ in range(2)]
    assert rollouts.response_lengths.tolist() == [2, 2, 0, 0, 0, 0, 8, 8]
    assert rollouts.finish_reasons == ["length"] * 2 + ["skipped"] * 4 + ["length"] * 2
    assert engine.counters == RolloutCounters(skipped_prompts=2)


def test_prompts_of_more_tokens_than_one_step_takes(engine: VLLMEngine, model: PreTrainedModel) -> None:
    prompts = prompt_batch({f"{row}": [5 + (row * place + row) % 50 for place in range(50)] for row in range(64)})
    rollouts = engine.generate(prompts, SamplingConfig(max_new_tokens=2), rl_step=0)
    assert largest_difference(model, rollouts) < 1e-5


def test_e07_stop_string_ends_ids_log_probs_and_text_together(engine: VLLMEngine, model: PreTrainedModel) -> None:
    free = engine.generate(PROMPTS, SamplingConfig(n=8, max_new_tokens=24), rl_step=0)
    row = next(row for row in range(24) if len(free.responses[row]) > 12)
    text = free.responses[row]
    stop = text[5:7]
    cut = engine.generate(PROMPTS, SamplingConfig(n=8, max_new_tokens=24, stop=[stop]), rl_step=0)
    end = text.index(stop) + 2
    assert cut.responses[row] == text[:end]
    ids = response_ids(free, row)
    characters = [place for place, token in enumerate(ids) if token >= len(SPECIAL)]  # one for each of such ids
    length = characters[end - 1] + 1
    assert response_ids(cut, row) == ids[:length]
    assert response_log_probs(cut, row) == pytest.approx(response_log_probs(free, row)[:length], abs=1e-5)
    assert cut.finish_reasons[row] == "stop"
    assert largest_difference(model, cut) < 1e-5


def test_e07_stop_token_is_the_last_one(engine: VLLMEngine) -> None:
    free = engine.generate(PROMPTS, SamplingConfig(n=8, max_new_tokens=24), rl_step=0)
    row = next(row for row in range(24) if len(response_ids(free, row)) > 12)
    stop = response_ids(free, row)[6]
    cut = engine.generate(PROMPTS, SamplingConfig(n=8, max_new_tokens=24, stop_token_ids=[stop]), rl_step=0)
    end = response_ids(free, row).index(stop) + 1
    assert response_ids(cut, row) == response_ids(free, row)[:end]
    assert cut.finish_reasons[row] == "stop"


def test_e09_answer_that_is_only_eos_is_one_token(engine: VLLMEngine, model: PreTrainedModel) -> None:
    torch.nn.init.zeros_(model.lm_head.weight)  # all 64 ids are equally likely
    push(engine, model, version=1)
    rollouts = engine.generate(PROMPTS, SamplingConfig(n=60, max_new_tokens=2), rl_step=0)
    rows = [row for row in range(180) if response_ids(rollouts, row) == [EOS_ID]]
    assert rows
    for row in rows:
        assert rollouts.responses[row] == ""
        assert rollouts.finish_reasons[row] == "stop"
        assert response_log_probs(rollouts, row) == pytest.approx([-4.1588831], abs=1e-6)  # -log 64


def test_d04_d05_same_prompt_before_and_after_a_push(engine: VLLMEngine, model: PreTrainedModel) -> None:
    sampling = SamplingConfig(n=4, max_new_tokens=8)
    assert largest_difference(model, engine.generate(LONG, sampling, rl_step=0)) < 1e-5
    perturb(model, seed=1)
    engine.load_weights(model.state_dict().items())
    engine.weight_version = 1
    stale = engine.generate(LONG, sampling, rl_step=0)
    assert largest_difference(model, stale) > 1e-2, "the prefix cache was not used: this test shows nothing"
    engine.reset_prefix_cache()
    fresh = engine.generate(LONG, sampling, rl_step=0)
    assert largest_difference(model, fresh) < 1e-5
    assert set(fresh.token_versions[fresh.response_mask].tolist()) == {1}


def test_score_is_hfs_and_reads_no_prefix_cache(engine: VLLMEngine, model: PreTrainedModel) -> None:
    engine.generate(LONG, SamplingConfig(max_new_tokens=4), rl_step=0)
    perturb(model, seed=2)
    engine.load_weights(model.state_dict().items())  # the cache holds the old weights' keys and values
    engine.weight_version = 1
    rows = [LONG.prompt_token_ids[0], [5], [5 + place % 50 for place in range(MAX_LENGTH)]]
    for temperature in (1.0, 0.5):
        for row, score in zip(rows, engine.score(rows, temperature=temperature), strict=True):
            assert score == pytest.approx(naive_log_probs(model, row, temperature=temperature), abs=1e-5)
    assert engine.score([]) == []
    with pytest.raises(ValueError, match=f"Cannot score {MAX_LENGTH + 1} ids"):
        engine.score([[5] * (MAX_LENGTH + 1)])


def test_push_that_fails_takes_the_engine_out_of_service_until_a_whole_one(
    engine: VLLMEngine, model: PreTrainedModel
) -> None:
    state = model.state_dict()
    with pytest.raises(ValueError, match=r"missing: \['lm_head.weight'\]"):
        engine.load_weights((name, tensor) for name, tensor in state.items() if name != "lm_head.weight")
    assert engine.weight_version is None
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.generate(PROMPTS, SamplingConfig(), rl_step=0)

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(state.items())[:5]
        raise ConnectionError("half-way")

    with pytest.raises(ConnectionError, match="half-way"):
        engine.load_weights(breaks())
    push(engine, model, version=2)
    assert largest_difference(model, engine.generate(PROMPTS, SamplingConfig(max_new_tokens=8), rl_step=0)) < 1e-5


def in_background(engine: VLLMEngine, sampling: SamplingConfig) -> tuple[threading.Thread, list[object]]:
    """Starts ``generate`` in a thread, and waits until it has sampled some tokens."""
    steps, results, step = [], [], engine._vllm.step

    def counting_step() -> object:
        steps.append(None)
        time.sleep(0.01)  # long enough for the other thread to come in between
        return step()

    def run() -> None:
        try:
            engine._vllm.step = counting_step
            results.append(engine.generate(LONG, sampling, rl_step=0))
        finally:
            del engine._vllm.step

    thread = threading.Thread(target=run)
    thread.start()
    end = time.monotonic() + 10
    while len(steps) < 5:
        assert time.monotonic() < end
        time.sleep(0.001)
    return thread, results


def test_d05_weights_change_under_paused_responses_whose_tokens_know_their_versions(
    engine: VLLMEngine, model: PreTrainedModel
) -> None:
    old = tiny_model().eval()
    perturb(model, seed=3)
    sampling = SamplingConfig(n=4, max_new_tokens=28, temperature=0.8)
    thread, results = in_background(engine, sampling)
    engine.pause()
    push(engine, model, version=1)
    engine.resume()
    thread.join(20)
    rollouts, both = results[0], 0
    for row in range(4):
        ids, own = row_ids(rollouts, row), response_log_probs(rollouts, row)
        start, end = rollouts.cu_seqlens[row : row + 2].tolist()
        versions = rollouts.token_versions[start:end][100:].tolist()
        assert versions == sorted(versions)
        both += set(versions) == {0, 1}
        by_version = [naive_log_probs(one, ids, temperature=0.8)[100:] for one in (old, model)]
        expected = [by_version[version][place] for place, version in enumerate(versions)]
        assert own == pytest.approx(expected, abs=2e-5)
    assert both


def test_abort_keeps_what_was_sampled(engine: VLLMEngine, model: PreTrainedModel) -> None:
    thread, results = in_background(engine, SamplingConfig(n=4, max_new_tokens=28))
    engine.abort()
    thread.join(20)
    rollouts = results[0]
    assert "abort" in rollouts.finish_reasons
    assert 0 < int(rollouts.response_lengths.min()) <= int(rollouts.response_lengths.max()) < 28
    assert largest_difference(model, rollouts) < 1e-5
    again = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=4), rl_step=0)
    assert "abort" not in again.finish_reasons


def test_d09_sleep_wakes_in_two_steps_and_deep_sleep_needs_a_push(engine: VLLMEngine, model: PreTrainedModel) -> None:
    def buffers() -> dict[str, torch.Tensor]:
        return engine._on_worker(lambda worker: {n: b.clone() for n, b in worker.model_runner.model.named_buffers()})

    before = buffers()
    assert any("cos_sin_cache" in name for name in before)
    engine.sleep(1)
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.score([[5, 6]])
    engine.wake_up()
    assert engine.score([[5, 6]])[0] == pytest.approx(naive_log_probs(model, [5, 6]), abs=1e-5)
    for version in (1, 2, 3):
        engine.sleep(2)
        engine.wake_up(["weights"])
        perturb(model, seed=version)
        engine.load_weights(model.state_dict().items())
        engine.wake_up(["kv_cache"])
        with pytest.raises(RuntimeError, match="deep sleep"):
            engine.score([[5, 6, 7]])
        engine.weight_version = version
        assert engine.score([[5, 6, 7]])[0] == pytest.approx(naive_log_probs(model, [5, 6, 7]), abs=1e-5)
        after = buffers()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], buffer) for name, buffer in before.items())


def test_process_is_as_it_was(shared: tuple[VLLMEngine, dict[str, tuple[object, ...]]], engine: VLLMEngine) -> None:
    before, after = shared[1]["before"], shared[1]["after"]
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])
    assert after[2:] == before[2:]
    assert not dist.is_initialized()
    state = torch.get_rng_state()
    engine.generate(PROMPTS, SamplingConfig(n=2, max_new_tokens=4), rl_step=0)
    engine.score([[5, 6]])
    assert torch.equal(torch.get_rng_state(), state)
    try:
        torch.set_num_threads(2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_trainer_can_still_compile(engine: VLLMEngine) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend)
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert len(graphs) == 1


def test_second_engine_beside_the_first_is_refused(engine: VLLMEngine) -> None:
    with pytest.raises(RuntimeError, match="has a VLLMEngine already"):
        VLLMEngine(engine.directory.path, max_model_len=8, kv_cache_bytes=2**25)


def test_ids_stay_inside_the_vocabulary(engine: VLLMEngine) -> None:
    rollouts = engine.generate(PROMPTS, SamplingConfig(n=8, max_new_tokens=16, temperature=2.0), rl_step=0)
    assert int(rollouts.tokens.max()) < VOCAB_SIZE
    assert engine.counters.dropped_samples == 0


DIGITS = {character: VOCAB_SIZE - len(CHARACTERS) + place for place, character in enumerate(CHARACTERS)}


@pytest.mark.parametrize(
    ("guide", "form"),
    [
        (Guide(regex="[0-9]{2}=[a-c]"), r"[0-9]{2}=[a-c]"),
        (Guide(choice=["yes", "no"]), "yes|no"),
        (Guide(json_schema={"type": "array", "items": {"enum": [1, 2]}, "maxItems": 1}), r"\[\s*[12]?\s*\]"),
    ],
)  # fmt: skip
def test_a_guide_gives_every_response_its_form(engine: VLLMEngine, guide: Guide, form: str) -> None:
    rollouts = engine.generate(PROMPTS, SamplingConfig(n=4, max_new_tokens=40, guide=guide), rl_step=0)
    whole = [text for text, why in zip(rollouts.responses, rollouts.finish_reasons, strict=True) if why == "stop"]
    assert len(whole) >= 8
    for text in whole:
        assert re.fullmatch(form, text), text


def test_log_probs_under_a_guide_are_those_among_what_it_allows(engine: VLLMEngine, model: PreTrainedModel) -> None:
    sampling = SamplingConfig(n=8, max_new_tokens=4, temperature=0.7, guide=Guide(choice=["1", "2", "7"]))
    rollouts = engine.generate(PROMPTS, sampling, rl_step=0)
    allowed = [DIGITS[digit] for digit in "127"]
    for row in range(len(rollouts)):
        ids = row_ids(rollouts, row)
        token, end = response_ids(rollouts, row)
        logits = model(torch.tensor([ids[:-2]])).logits[0, -1].detach().float()[allowed] / 0.7
        first, last = response_log_probs(rollouts, row)
        assert first == pytest.approx(float(torch.log_softmax(logits, -1)[allowed.index(token)]), abs=1e-5)
        assert (end, last) == (EOS_ID, pytest.approx(0.0, abs=1e-6))  # nothing else may follow


def test_the_reference_engine_refuses_a_guide(engine: VLLMEngine) -> None:
    reference = HFReferenceEngine(engine.directory.path, max_model_len=32)
    with pytest.raises(ValueError, match="use vLLM for guided decoding"):
        reference.generate(PROMPTS, SamplingConfig(guide=Guide(regex="a")), rl_step=0)
    with pytest.raises(ValueError, match="vLLM refuses the request"):
        engine.generate(PROMPTS, SamplingConfig(guide=Guide(regex="(")), rl_step=0)
    assert "abort" not in engine.generate(PROMPTS, SamplingConfig(max_new_tokens=2), rl_step=0).finish_reasons
