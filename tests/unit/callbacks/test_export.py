from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from support.scripted import ScriptedGRPO, scripted_fit
from support.tiny import tiny_model, tiny_tokenizer, write_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.callbacks import HFExport
from lightning_rlhf.callbacks.export import _write_weights

PROMPT = torch.tensor([[5, 6, 7, 8]])


def export(**kwargs: Any) -> HFExport:
    return HFExport(console=Console(file=io.StringIO()), **kwargs)


def names_in(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(PROMPT).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("as_path", [False, True])
def test_transformers_loads_what_was_trained(tmp_path: Path, tied: bool, as_path: bool) -> None:
    reference = tiny_model(tied=tied, seed=4)
    model = write_tiny_model(tmp_path / "start", tied=tied, seed=4) if as_path else tiny_model(tied=tied, seed=4)

    class Moved(ScriptedGRPO):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                for parameter in self.actor.module.parameters():
                    parameter.mul_(1.01)
            super().training_step(batch, batch_idx)

    tokenizer = None if as_path else tiny_tokenizer()
    module = Moved([0.5, 0.5], model=model, tokenizer=tokenizer)
    scripted_fit(module, tmp_path, [export(dirpath=tmp_path / "out")])
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.01).mul_(1.01)

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(reference))
    assert ("lm_head.weight" in names_in(tmp_path / "out")) == (not tied)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert "_attn_implementation" not in config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert tokenizer.encode("1+1") == tiny_tokenizer().encode("1+1")


def test_the_default_folder_and_the_message(tmp_path: Path) -> None:
    callback = export()
    scripted_fit(ScriptedGRPO([0.5]), tmp_path, [callback])
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert not (tmp_path / "hf" / ".partial").exists()
    assert callback.console.file.getvalue() == f"model: {tmp_path / 'hf'}\n"


def test_another_dtype_is_written_and_named(tmp_path: Path) -> None:
    scripted_fit(ScriptedGRPO([0.5]), tmp_path, [export(dtype="bfloat16")])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.embed_tokens.weight, tiny_model().model.embed_tokens.weight.bfloat16())
    for wrong in ("int8", "bf16", "nn", torch.int8):
        with pytest.raises(ValueError, match="dtype must name a floating dtype"):
            HFExport(dtype=wrong)


def test_several_files_and_a_second_export_over_them(tmp_path: Path) -> None:
    scripted_fit(ScriptedGRPO([0.5]), tmp_path, [export(max_file_bytes=40_000)])
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")), logits(tiny_model()))

    (tmp_path / "hf" / "notes.txt").write_text("mine")
    model = tiny_model(seed=9)
    scripted_fit(ScriptedGRPO([0.5], model=model), tmp_path, [export()])
    assert [path.name for path in (tmp_path / "hf").glob("model*")] == ["model.safetensors"]
    assert (tmp_path / "hf" / "notes.txt").read_text() == "mine"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")), logits(tiny_model(seed=9)))


def test_one_buffer_used_again_and_again_is_copied(tmp_path: Path) -> None:
    def reused() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.zeros(3)
        for index in range(3):
            yield f"t{index}", buffer.fill_(index)

    _write_weights(tmp_path, reused(), dtype=None, max_file_bytes=24)
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
    assert found == {"t0": [0.0] * 3, "t1": [1.0] * 3, "t2": [2.0] * 3}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 36
    assert index["weight_map"]["t2"] == "model-00002-of-00002.safetensors"


def test_a_wrong_tensor_is_named_and_the_generator_is_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    class Wrong(ScriptedGRPO):
        def on_train_start(self) -> None:
            engine = self.actor
            right = engine.get_per_tensor_param

            def wrong() -> Iterator[tuple[str, Tensor]]:
                for name, tensor in right():
                    drawn.append(name)
                    yield ("wrapper." + name if len(drawn) == 2 else name), tensor

            monkeypatch.setattr(engine, "get_per_tensor_param", wrong)
            super().on_train_start()

    with pytest.raises(RuntimeError, match=r"Rank 0 could not export .* no tensor 'wrapper\."):
        scripted_fit(Wrong([0.5]), tmp_path, [export()])
    assert len(drawn) == len(list(tiny_model().named_parameters()))
    assert not (tmp_path / "hf" / "config.json").exists()
