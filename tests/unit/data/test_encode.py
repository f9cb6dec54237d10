from __future__ import annotations

import pytest
from support.tiny import tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.data import ListPrompts, Prompt, encode_prompt, encode_prompts, fit_length

CHAT = [{"role": "user", "content": "hello world"}]


def bos_tokenizer(*, chat_template: str | None) -> PreTrainedTokenizerFast:
    """BOS is id 1, and added by a plain encode(); "hello world" is [5, 6]."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "hello": 5, "world": 6}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair=None, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=chat_template
    )


def test_e06_one_bos_with_and_without_a_chat_template() -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with_template, without = bos_tokenizer(chat_template=template), bos_tokenizer(chat_template=None)
    assert with_template.encode("hello world") == [1, 5, 6, 2]  # the trap: what a second encode would add
    assert encode_prompt(with_template, CHAT) == [1, 5, 6]
    assert encode_prompt(with_template, "hello world") == [1, 5, 6]
    assert encode_prompt(without, "hello world") == [1, 5, 6]
    assert encode_prompt(without, "<s> hello world") == [1, 5, 6]


def test_e06_a_template_without_bos_is_left_alone_and_no_bos_is_invented() -> None:
    tokenizer = bos_tokenizer(chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}")
    assert encode_prompt(tokenizer, "hello world") == [5, 6]
    tiny = tiny_tokenizer()
    tiny.chat_template = None
    assert tiny.bos_token_id is None
    assert encode_prompt(tiny, "ab") == tiny.convert_tokens_to_ids(["a", "b"])


def test_a_text_is_one_user_message_and_the_generation_prompt_is_added_once() -> None:
    tiny = tiny_tokenizer()
    expected = tiny.convert_tokens_to_ids(["<user>", "h", "i", "<eos>", "<assistant>"])
    assert encode_prompt(tiny, "hi") == expected
    assert encode_prompt(tiny, [{"role": "user", "content": "hi"}]) == expected


def test_a_chat_that_ends_with_an_assistants_message_is_continued() -> None:
    tiny = tiny_tokenizer()
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    expected = tiny.convert_tokens_to_ids(["<user>", "h", "i", "<eos>", "<assistant>", "y", "o"])
    assert encode_prompt(tiny, chat) == expected


def test_chat_template_variables_reach_the_template() -> None:
    tokenizer = bos_tokenizer(chat_template="{{ bos_token }}{{ 'a' if thinking else 'b' }}")
    assert encode_prompt(tokenizer, "x", chat_template_kwargs={"thinking": True}) == [1, 3]
    assert encode_prompt(tokenizer, "x") == [1, 4]


def test_a_chat_without_a_template_and_a_prompt_without_tokens_are_errors() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(bos_tokenizer(chat_template=None), CHAT)
    with pytest.raises(ValueError, match="has no tokens"):
        encode_prompt(bos_tokenizer(chat_template="{{ '' }}"), "x")


def test_e03_truncation_keeps_the_last_tokens() -> None:
    ids = list(range(40))
    assert fit_length(ids, max_tokens=24, overlong="truncate_left") == list(range(16, 40))
    assert fit_length(ids, max_tokens=24, overlong="drop") is None
    assert fit_length(ids, max_tokens=40, overlong="error") == ids
    assert fit_length(ids, max_tokens=None, overlong="error") == ids
    with pytest.raises(ValueError, match="40 tokens, but max_prompt_tokens=24"):
        fit_length(ids, max_tokens=24, overlong="error")


def test_e03_every_rule_is_counted_and_names_its_prompts() -> None:
    prompts = ListPrompts(
        [Prompt(uid="short", prompt="ab"), Prompt(uid="long", prompt="abcdef"), Prompt(uid="last", prompt="a")]
    ).load()
    tiny = tiny_tokenizer()  # <user> ... <eos> <assistant>: three tokens more
    kept, report = encode_prompts(tiny, prompts, max_prompt_tokens=6, overlong="drop")
    assert [e.prompt.uid for e in kept] == ["short", "last"]
    assert (report.total, report.dropped, report.truncated, report.longest) == (3, ["long"], [], 9)
    kept, report = encode_prompts(tiny, prompts, max_prompt_tokens=6, overlong="truncate_left")
    assert [len(e.token_ids) for e in kept] == [5, 6, 4]
    assert kept[1].token_ids == tiny.convert_tokens_to_ids(["c", "d", "e", "f", "<eos>", "<assistant>"])
    assert (report.dropped, report.truncated) == ([], ["long"])
    with pytest.raises(ValueError, match="Prompt 'long': 9 tokens, but max_prompt_tokens=6"):
        encode_prompts(tiny, prompts, max_prompt_tokens=6, overlong="error")
