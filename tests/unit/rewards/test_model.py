from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny import tiny_model, tiny_tokenizer, write_tiny_reward_model
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from lightning_rlhf.contracts.engine import EngineConfig, EngineRegistry
from lightning_rlhf.rewards import ModelReward, score
from lightning_rlhf.types import Experience, ModelOutputs

PROMPTS = ["1 + 1 =", "2 + 2 =", "3 + 3 =", "4 + 4 ="]
RESPONSES = ["2", "five", "", "0123456789"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_reward_model(tmp_path_factory.mktemp("reward_model"))


@torch.no_grad()
def by_transformers(directory: Path, texts: list[str]) -> list[float]:
    judge = LlamaForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = tiny_tokenizer()
    ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    return [float(judge(torch.tensor([one])).logits[0, 0]) for one in ids]


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_the_reward_is_the_models_own_score_of_prompt_and_response(directory: Path, micro_batch_size: int) -> None:
    reward = ModelReward.from_pretrained(directory, micro_batch_size=micro_batch_size)
    scores = score(reward, PROMPTS, RESPONSES, [{}] * 4)
    expected = by_transformers(directory, [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    assert scores.rewards.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1  # it tells them apart
    assert list(scores.components) == ["reward_model"]


def test_a_template_makes_the_text_and_what_is_too_long_fails(directory: Path) -> None:
    reward = ModelReward.from_pretrained(directory, template=lambda p, r: f"{r}<user>{p}", max_length=12)
    scores = score(reward, PROMPTS, RESPONSES, [{}] * 4)
    assert scores.rewards.isnan().tolist() == [False, True, False, True]  # 7 + 1 + 1, 12 + 1, 8 + 1, 18 + 1 tokens
    expected = by_transformers(directory, ["2<user>1 + 1 =", "<user>3 + 3 ="])
    assert scores.rewards[[0, 2]].tolist() == pytest.approx(expected, abs=1e-5)


def test_an_engine_that_is_given_scores_also_no_row(directory: Path) -> None:
    engine = EngineRegistry.new("value_model", "torch", EngineConfig(model=directory), device=torch.device("cpu"))
    engine.initialize()
    reward = ModelReward(engine, tiny_tokenizer())
    assert reward(["a"], ["b"], [{}]) == [0.0]  # a head of its own starts at zero
    assert reward([], [], []) == []


@pytest.mark.parametrize("written", ["", "<s> "])
def test_e06_one_bos_whether_the_text_has_it_or_not(monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 5, "world": 6}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    engine = EngineRegistry.new("value_model", "torch", EngineConfig(model=tiny_model()), device=torch.device("cpu"))
    engine.initialize()
    seen: list[list[int]] = []
    infer = engine.infer_batch

    def watched(data: Experience) -> ModelOutputs:
        seen.append(data.tokens.tolist())
        return infer(data)

    monkeypatch.setattr(engine, "infer_batch", watched)
    ModelReward(engine, tokenizer)([f"{written}hello "], ["world"], [{}])
    assert seen == [[1, 5, 6, 2, 2]]  # the last one closes the sequence, and nobody reads it


def test_a_directory_without_a_head_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no score\.weight"):
        ModelReward.from_pretrained(tmp_path)
