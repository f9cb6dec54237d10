from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import EOS_ID, VOCAB_SIZE, tiny_model, tiny_tokenizer, write_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_directory_holds_the_model(tmp_path: Path, family: str, tied: bool):
    write_tiny_model(tmp_path, family=family, tied=tied, seed=3)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(20)[None]
    assert torch.equal(loaded(tokens).logits, tiny_model(family=family, tied=tied, seed=3).eval()(tokens).logits)
    assert loaded.dtype == torch.float32
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied


def test_seeds_differ_and_the_global_rng_is_left_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second = tiny_model(seed=0), tiny_model(seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_the_tokenizer_goes_by_character_and_back(tmp_path: Path):
    tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert VOCAB_SIZE == len(tokenizer) == 64
    ids = tokenizer("what is 12+34?").input_ids
    assert len(ids) == len("what is 12+34?")
    assert tokenizer.decode(ids) == "what is 12+34?"
    assert tokenizer("ab<eos>c").input_ids[2] == EOS_ID
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<user>1+1<eos><assistant>"
    assert len(tokenizer(text).input_ids) == 6
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == "1+1"
