from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.rollout import (
    largest_difference,
    naive_log_probs,
    perturb,
    prompt_batch,
    response_ids,
    response_log_probs,
    row_ids,
)
from support.tiny import EOS_ID, VOCAB_SIZE, tiny_model, write_tiny_model
from torch import Tensor

from lightning_rlhf.contracts.rollout import SamplingConfig
from lightning_rlhf.rollout.hf import HFReferenceEngine, sampling_log_probs

PROMPTS = prompt_batch({"a": [5, 6, 7], "b": [9, 10, 11, 12, 13], "c": [20]})


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def build(path: Path, *, tied: bool = True, max_model_len: int = 64) -> HFReferenceEngine:
    engine = HFReferenceEngine(write_tiny_model(path, tied=tied), max_model_len=max_model_len)
    push(engine, tiny_model(tied=tied), version=0)
    return engine


def push(engine: HFReferenceEngine, model: torch.nn.Module, *, version: int) -> None:
    engine.load_weights(model.state_dict().items())
    engine.reset_prefix_cache()
    engine.weight_version = version


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_log_probs_are_those_of_a_whole_forward_at_the_sampling_temperature(tmp_path: Path, temperature: float) -> None:
    sampling = SamplingConfig(n=3, max_new_tokens=10, temperature=temperature)
    rollouts = build(tmp_path).generate(PROMPTS, sampling, rl_step=0)
    assert largest_difference(tiny_model(tied=True).eval(), rollouts, temperature=temperature or 1.0) < 1e-5
    assert rollouts.temperature == (temperature or 1.0)
    assert rollouts.uids == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert rollouts.sample_indices == [0, 1, 2] * 3


def test_greedy_takes_the_most_likely_token(tmp_path: Path) -> None:
    rollouts = build(tmp_path).generate(PROMPTS, SamplingConfig(n=2, max_new_tokens=6, temperature=0), rl_step=0)
    model = tiny_model(tied=True).eval()
    for row in range(len(rollouts)):
        ids, response = row_ids(rollouts, row), response_ids(rollouts, row)
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert response == best[len(ids) - len(response) - 1 : -1]


def test_e01_samples_depend_on_seed_step_uid_and_index_alone(tmp_path: Path) -> None:
    engine = build(tmp_path)
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


def test_e03_response_is_cut_to_the_room_and_long_prompts_are_skipped(tmp_path: Path) -> None:
    engine = build(tmp_path, max_model_len=32)
    prompts = prompt_batch({"room for 2": [5] * 30, "none": [6] * 32, "too long": [7] * 40, "plenty": [8] * 4})
    rollouts = engine.generate(prompts, SamplingConfig(n=2, max_new_tokens=8, top_k=1), rl_step=0)
    assert len(rollouts) == 8
    assert rollouts.uids == [uid for uid in prompts.uids for _ in range(2)]
    assert rollouts.response_lengths.tolist()[:6] == [2, 2, 0, 0, 0, 0]
    assert rollouts.finish_reasons[:6] == ["length"] * 2 + ["skipped"] * 4
    assert rollouts.lengths.tolist()[:6] == [32, 32, 32, 32, 40, 40]
    assert engine.counters.skipped_prompts == 2


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[[str], HFReferenceEngine]:
    """An engine whose model says a given text after any prompt, whatever was said."""

    def build_scripted(text: str) -> HFReferenceEngine:
        engine = build(tmp_path)
        said = [*engine.directory.tokenizer(text).input_ids, EOS_ID]
        network = engine._model
        forward = network.forward

        def forward_scripted(inputs: Tensor, **kwargs: object) -> object:
            output = forward(inputs, **kwargs)
            spoken = output.past_key_values.get_seq_length() - 1
            output.logits = torch.full_like(output.logits, -100.0)
            output.logits[:, -1, said[min(spoken, len(said) - 1)]] = 0.0
            return output

        network.forward = forward_scripted
        return engine

    return build_scripted


LETTER_A = 15
"""Its id in the tiny tokenizer: five special tokens, ten digits."""


@pytest.mark.parametrize(
    ("config", "text", "length", "reason"),
    [
        (SamplingConfig(temperature=0, stop=["</a>"]), "xy</a>", 6, "stop"),
        (SamplingConfig(temperature=0, stop_token_ids=[LETTER_A]), "xy</a", 5, "stop"),
        (SamplingConfig(temperature=0, max_new_tokens=2), "xy", 2, "length"),
        (SamplingConfig(temperature=0), "xy</a>zzz", 10, "stop"),  # EOS is counted, and not in the text
        (SamplingConfig(temperature=0, max_new_tokens=10), "xy</a>zzz", 10, "stop"),
    ],
)
def test_e07_where_a_scripted_response_ends(
    scripted: Callable[[str], HFReferenceEngine], config: SamplingConfig, text: str, length: int, reason: str
) -> None:
    rollouts = scripted("xy</a>zzz").generate(prompt_batch({"a": [9]}), config, rl_step=0)
    assert rollouts.responses == [text]
    assert rollouts.response_lengths.tolist() == [length]
    assert rollouts.finish_reasons == [reason]
    assert (response_ids(rollouts, 0)[-1] == EOS_ID) is (length == 10)


def test_e09_answer_that_is_only_eos_is_one_trained_token(scripted: Callable[[str], HFReferenceEngine]) -> None:
    rollouts = scripted("").generate(prompt_batch({"a": [9]}), SamplingConfig(n=2, temperature=0), rl_step=0)
    assert [response_ids(rollouts, row) for row in range(2)] == [[EOS_ID], [EOS_ID]]
    assert rollouts.responses == ["", ""]
    assert rollouts.rollout_log_probs.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_d04_d05_new_weights_count_for_the_same_prompt(tmp_path: Path, tied: bool) -> None:
    engine = build(tmp_path, tied=tied)
    model = tiny_model(tied=tied).eval()
    sampling = SamplingConfig(n=2, max_new_tokens=8)
    engine.generate(PROMPTS, sampling, rl_step=0)
    perturb(model, seed=1)
    push(engine, model, version=5)
    rollouts = engine.generate(PROMPTS, sampling, rl_step=0)
    assert largest_difference(model, rollouts) < 1e-5
    assert set(rollouts.token_versions[rollouts.response_mask].tolist()) == {5}
    assert set(rollouts.token_versions[~rollouts.response_mask].tolist()) == {-1}


def test_push_that_fails_takes_the_engine_out_of_service_until_a_whole_one(tmp_path: Path) -> None:
    engine = build(tmp_path, tied=False)
    state = tiny_model(tied=False).state_dict()
    with pytest.raises(ValueError, match=r"'lm_head.weight'"):
        engine.load_weights((name, tensor) for name, tensor in state.items() if name != "lm_head.weight")
    assert engine.weight_version is None
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.generate(PROMPTS, SamplingConfig(), rl_step=0)
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.score([[5, 6]])
    push(engine, tiny_model(tied=False), version=2)
    engine.generate(PROMPTS, SamplingConfig(max_new_tokens=2), rl_step=0)


def test_new_engine_has_no_weights(tmp_path: Path) -> None:
    engine = HFReferenceEngine(write_tiny_model(tmp_path), max_model_len=8)
    with pytest.raises(RuntimeError, match="none were pushed"):
        engine.generate(PROMPTS, SamplingConfig(), rl_step=0)


def test_d09_deep_sleep_keeps_buffers_and_needs_a_push(tmp_path: Path) -> None:
    engine = build(tmp_path)
    model = tiny_model(tied=True).eval()
    inverse_frequencies = engine._model.model.rotary_emb.inv_freq.clone()
    for version in range(1, 4):
        engine.sleep(2)
        assert engine._model.model.embed_tokens.weight.untyped_storage().nbytes() == 0
        with pytest.raises(RuntimeError, match="asleep; wake_up"):
            engine.load_weights(model.state_dict().items())
        engine.wake_up(["weights"])
        perturb(model, seed=version, scale=0.1)
        engine.load_weights(model.state_dict().items())
        engine.wake_up(["kv_cache"])
        with pytest.raises(RuntimeError, match="deep sleep"):
            engine.score([[5, 6]])
        engine.weight_version = version
        assert engine.score([[5, 6, 7]])[0] == pytest.approx(naive_log_probs(model, [5, 6, 7]), abs=1e-5)
        assert torch.equal(engine._model.model.rotary_emb.inv_freq, inverse_frequencies)


def test_light_sleep_keeps_weights(tmp_path: Path) -> None:
    engine = build(tmp_path)
    before = engine.score([[5, 6, 7]])
    engine.sleep(1)
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.score([[5, 6, 7]])
    engine.wake_up()
    assert engine.score([[5, 6, 7]]) == before


def test_score_at_a_temperature(tmp_path: Path) -> None:
    engine, model = build(tmp_path), tiny_model(tied=True).eval()
    rows = [[5], [5, 6, 7, 8], [9, 10]]
    scores = engine.score(rows, temperature=0.5)
    for row, score in zip(rows, scores, strict=True):
        assert score == pytest.approx(naive_log_probs(model, row, temperature=0.5), abs=1e-5)


def test_read_back_is_what_was_pushed(tmp_path: Path, tied: bool) -> None:
    engine, state = build(tmp_path, tied=tied), tiny_model(tied=tied).state_dict()
    held = engine.read_weights([*state, "unknown"])
    assert held.keys() == state.keys()
    assert all(torch.equal(held[name], state[name]) for name in state)


def test_trainers_rng_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    build(tmp_path).generate(PROMPTS, SamplingConfig(n=2, max_new_tokens=4), rl_step=0)
    assert torch.equal(torch.get_rng_state(), before)


def paused_after_tokens(engine: HFReferenceEngine, count: int) -> threading.Event:
    """Pauses the engine, from inside, once its model ran ``count`` times; the event tells that it did."""
    paused, forward, calls = threading.Event(), engine._model.forward, []

    def forward_counting(*args: object, **kwargs: object) -> object:
        calls.append(None)
        if len(calls) == count:
            threading.Thread(target=lambda: (engine.pause(), paused.set())).start()
            while not engine._gate._paused:
                pass
        return forward(*args, **kwargs)

    engine._model.forward = forward_counting
    return paused


def test_weights_change_under_a_paused_response_whose_tokens_know_their_versions(tmp_path: Path) -> None:
    engine = build(tmp_path, tied=False)
    old, new = tiny_model(tied=False).eval(), tiny_model(tied=False).eval()
    perturb(new, seed=3)
    paused, results = paused_after_tokens(engine, 3), []
    prompts, sampling = prompt_batch({"a": [5, 6, 7]}), SamplingConfig(n=2, max_new_tokens=8)
    thread = threading.Thread(target=lambda: results.append(engine.generate(prompts, sampling, rl_step=0)))
    thread.start()
    assert paused.wait(5)
    push(engine, new, version=1)
    engine.resume()
    thread.join(5)
    rollouts = results[0]
    for row in range(2):
        ids, own = row_ids(rollouts, row), response_log_probs(rollouts, row)
        assert len(own) > 3
        start, end = rollouts.cu_seqlens[row : row + 2].tolist()
        assert rollouts.token_versions[start + 3 : end].tolist() == [0, 0, 0] + [1] * (len(own) - 3)
        assert own[:3] == pytest.approx(naive_log_probs(old, ids)[3:6], abs=1e-5)
        assert own[3:] == pytest.approx(naive_log_probs(new, ids)[6:], abs=1e-5)


def test_abort_keeps_what_was_sampled(tmp_path: Path) -> None:
    engine = build(tmp_path)
    paused, results = paused_after_tokens(engine, 2), []
    sampling = SamplingConfig(n=1, max_new_tokens=8)
    thread = threading.Thread(target=lambda: results.append(engine.generate(PROMPTS, sampling, rl_step=0)))
    thread.start()
    assert paused.wait(5)
    engine.abort()
    thread.join(5)
    engine.resume()
    assert results[0].finish_reasons == ["abort", "abort", "abort"]
    assert results[0].response_lengths.tolist() == [2, 0, 0]
    engine.generate(PROMPTS, SamplingConfig(max_new_tokens=2), rl_step=0)


LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))


@pytest.mark.parametrize(
    ("config", "probs"),
    [
        (SamplingConfig(), [0.5, 0.25, 0.15, 0.1]),
        (SamplingConfig(temperature=0.5), [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        (SamplingConfig(temperature=0), [0.5, 0.25, 0.15, 0.1]),
        (SamplingConfig(top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (SamplingConfig(top_k=9), [0.5, 0.25, 0.15, 0.1]),
        (SamplingConfig(top_p=0.7), [2 / 3, 1 / 3, 0, 0]),
        (SamplingConfig(top_p=0.01), [1, 0, 0, 0]),
        (SamplingConfig(min_p=0.25), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        (SamplingConfig(top_k=3, top_p=0.8), [2 / 3, 1 / 3, 0, 0]),  # of the three left, 0.83 are in the first two
    ],
)
def test_distribution_that_tokens_are_drawn_from(config: SamplingConfig, probs: list[float]) -> None:
    log_probs = sampling_log_probs(LOGITS, config)[0].tolist()
    assert log_probs == pytest.approx([math.log(p) if p else -math.inf for p in probs], abs=1e-5)


def test_e10_sample_outside_of_the_tokenizer_is_dropped(tmp_path: Path) -> None:
    engine = build(tmp_path)
    engine.directory = type(engine.directory)(
        path=engine.directory.path,
        config=engine.directory.config,
        tokenizer=engine.directory.tokenizer,
        vocab_size=VOCAB_SIZE // 2,
        end_token_ids=engine.directory.end_token_ids,
    )
    rollouts = engine.generate(PROMPTS, SamplingConfig(n=4, max_new_tokens=8), rl_step=0)
    dropped = [reason == "skipped" for reason in rollouts.finish_reasons]
    assert engine.counters.dropped_samples == sum(dropped) > 0
    kept = [response_ids(rollouts, row) for row in range(12)]
    assert max((token for ids in kept for token in ids), default=0) < VOCAB_SIZE // 2
