"""vLLM in a process that has loaded llvmlite before: numba does, and so do copies past the cache."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.fork import run_distributed
from support.tiny import write_tiny_model

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")


def _build_twice(model: Path) -> bool:
    import llvmlite.binding as llvm

    from lightning_rlhf.rollout.vllm import VLLMEngine

    assert callable(llvm.ffi.lib.__dict__), "llvmlite has changed: vLLM needs no help any more"
    for _ in range(2):
        VLLMEngine(model, max_model_len=64, max_num_seqs=8, kv_cache_bytes=16 << 20).shutdown()
    llvm.parse_assembly("define void @nothing() { ret void }").verify()  # its functions are there still
    return not hasattr(llvm.ffi.lib, "__dict__")


def test_an_engine_is_built_twice(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", family="llama")
    assert run_distributed(_build_twice, 1, model, init_process_group=False, timeout=120) == [True]
