"""vLLM loads what HFExport wrote, and computes the same log-probs as transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import toy_data, toy_module, toy_trainer
from transformers import AutoModelForCausalLM

from lightning_rlhf.callbacks import HFExport

IDS = [5, 6, 7, 8, 9, 10]


def _score_with_vllm(folder: Path) -> list[float]:
    from lightning_rlhf.rollout.vllm import VLLMEngine

    engine = VLLMEngine(folder, max_model_len=64, kv_cache_bytes=2**26, load_format="auto")
    engine.weight_version = 0
    try:
        return engine.score([IDS])[0]
    finally:
        engine.shutdown()


def test_vllm_loads_the_export(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model = write_tiny_model(tmp_path / "model", tied=True)
    trainer = toy_trainer(tmp_path, callbacks=[HFExport(max_file_bytes=100_000)])
    trainer.fit(toy_module(model, max_rl_steps=2), datamodule=toy_data())
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
        log_probs = loaded(torch.tensor([IDS])).logits[0].log_softmax(-1)
    expected = [0.0, *(float(log_probs[i - 1, IDS[i]]) for i in range(1, len(IDS)))]
    # In a process of its own: an engine keeps its parallel state in module globals.
    scored = run_distributed(_score_with_vllm, 1, tmp_path / "hf", init_process_group=False, timeout=120)[0]
    assert scored == pytest.approx(expected, abs=1e-4)
