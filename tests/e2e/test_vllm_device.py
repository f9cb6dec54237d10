"""The number that a rank's device has reaches vLLM's worker, for one device and for ranks that share a model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.vllm_imports import vllm_is_imported  # noqa: F401 (a fixture)

from lightning_rlhf.rollout import vllm_build, vllm_device, vllm_group
from lightning_rlhf.rollout.vllm import VLLMEngine

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_each_ranks_worker_has_the_ranks_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int
) -> None:
    """Of four devices the two ranks have the last two, as with ``Trainer(devices=[2, 3])``; a CPU has no number."""
    path = write_tiny_model(tmp_path / "model")

    def of_four(local_rank: int | None) -> int:
        return vllm_device.device_number(local_rank, current=2 + dist.get_rank(), count=4)

    monkeypatch.setattr(vllm_build, "own_device", of_four)
    monkeypatch.setattr(vllm_group, "own_device", of_four)

    def build() -> tuple[int, int]:
        from vllm.distributed.parallel_state import get_world_group

        engine = VLLMEngine(
            path, max_model_len=64, kv_cache_bytes=2**25, tensor_parallel_size=tensor_parallel_size, local_rank=None
        )
        found = engine._on_worker(lambda worker: worker.local_rank), get_world_group().device_index
        engine.shutdown()
        return found

    assert run_distributed(build, 2, timeout=200.0) == [(2, 2), (3, 3)]
