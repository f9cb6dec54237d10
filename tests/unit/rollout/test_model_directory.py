from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.tiny import EOS_ID, VOCAB_SIZE, tiny_model, write_tiny_model

from lightning_rlhf.rollout.model_directory import ModelDirectory, WeightNames, weight_names_of

NAMES = WeightNames(shapes={"embed": (3, 2), "norm": (2,)}, aliases={"head": "embed"})
EMBED, NORM = torch.zeros(3, 2), torch.zeros(2)


def pushed(*items: tuple[str, torch.Tensor]) -> list[str]:
    return [name for name, _ in NAMES.check(items)]


def test_d04_tied_head_may_be_sent_or_left_out() -> None:
    assert pushed(("embed", EMBED), ("norm", NORM)) == ["embed", "norm"]
    assert pushed(("head", EMBED), ("norm", NORM), ("embed", EMBED)) == ["norm", "embed"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([("embed", EMBED)], r"1 of 2 tensors are missing: \['norm'\]"),
        ([("head", EMBED), ("norm", NORM)], r"missing: \['embed'\]"),
        ([("module.embed", EMBED)], r"no tensor 'module.embed'"),
        ([("embed", EMBED), ("embed", EMBED)], "'embed' was sent twice"),
        ([("embed", EMBED[:2])], r"shape \(2, 2\), expected \(3, 2\)"),
        ([], "2 of 2"),
    ],
)
def test_push_that_is_not_whole_is_refused_by_name(items: list[tuple[str, torch.Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pushed(*items)


@pytest.mark.parametrize("tied", [True, False])
def test_d04_head_of_an_untied_model_is_required(tied: bool) -> None:
    names = weight_names_of(tiny_model(tied=tied))
    assert ("lm_head.weight" in names.shapes) is not tied
    assert names.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert names.shapes["model.embed_tokens.weight"] == (VOCAB_SIZE, 64)
    assert names.shapes["model.layers.1.self_attn.k_proj.weight"] == (32, 64)


def test_names_without_memory_are_those_of_the_model(tmp_path: Path) -> None:
    directory = ModelDirectory.read(write_tiny_model(tmp_path, tied=True))
    assert directory.weight_names() == weight_names_of(tiny_model(tied=True))


def test_ends_are_the_tokenizers_eos_and_the_generation_configs(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    assert ModelDirectory.read(tmp_path).end_token_ids == {EOS_ID}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [4, 9]}))
    directory = ModelDirectory.read(tmp_path)
    assert directory.end_token_ids == {EOS_ID, 4, 9}
    assert directory.vocab_size == VOCAB_SIZE


def test_model_without_an_end_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        file = tmp_path / name
        content = json.loads(file.read_text())
        content.pop(key, None)
        file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no EOS id"):
        ModelDirectory.read(tmp_path)


def test_text_leaves_special_tokens_out(tmp_path: Path) -> None:
    directory = ModelDirectory.read(write_tiny_model(tmp_path))
    ids = directory.tokenizer("1+2=3").input_ids
    assert directory.decode([*ids, EOS_ID]) == "1+2=3"
