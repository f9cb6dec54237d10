"""Shards read from files: the numbers of a model that was loaded whole, without its memory."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.experience import make_experience, policy_gradient
from support.fork import run_distributed
from support.tiny import tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineRegistry
from lightning_rlhf.contracts.lora import LoRAConfig
from lightning_rlhf.engines import fsdp2
from lightning_rlhf.engines.hf_model import PackedCausalLM, load_causal_lm
from lightning_rlhf.engines.meta_init import empty_model

CPU = torch.device("cpu")
LENGTHS = [5, 30, 8, 17, 3]
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
AXES = {"fsdp2": ("dp_replicate", "dp_shard"), "ulysses": ("dp_replicate", "dp_shard", "sp")}


def _engine(
    model: Any, *shape: int, backend: str = "fsdp2", kind: str = "language_model", **changes: Any
) -> BaseEngine:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[backend])
    config = EngineConfig(model=model, optimizer=ADAMW, **changes)
    engine = EngineRegistry.new(kind, backend, config, device=CPU, mesh=mesh)
    engine.initialize()
    return engine


def _numbers(engine: BaseEngine) -> tuple[float, Tensor, dict[str, Tensor]]:
    rows = range(engine.data_parallel_rank, len(LENGTHS), engine.data_parallel_size)
    loss = engine.train_batch(make_experience(LENGTHS).select(rows), policy_gradient)["loss"]
    log_probs = engine.infer_batch(make_experience(LENGTHS)).log_probs
    assert log_probs is not None
    return loss, log_probs, {name: value.clone() for name, value in engine.get_per_tensor_param()}


LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "two ranks": ((1, 2), {}),
    "hybrid": ((2, 2), {}),
    "uneven: 64 rows among 3": ((1, 3), {}),
    "bf16": ((1, 2), {"compute_dtype": torch.bfloat16}),
    "adapter": ((1, 2), {"lora": LoRAConfig(rank=3)}),
    "ulysses": ((1, 1, 2), {"backend": "ulysses"}),
}


CASES = [*((layout, False) for layout in LAYOUTS), ("two ranks", True), ("adapter", True)]


@pytest.mark.parametrize(("layout", "tied"), CASES)
def test_shards_from_files_are_bit_for_bit_those_of_a_whole_model(layout: str, tied: bool, tmp_path: Path) -> None:
    shape, changes = LAYOUTS[layout]
    tiny_model(hidden=128, tied=tied, seed=5).save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file(), "several files"

    def both() -> None:
        loaded_whole: list[Any] = []
        original = fsdp2.FSDP2Engine.place
        fsdp2.FSDP2Engine.place = lambda self, model: loaded_whole.append(model) or original(self, model)  # type: ignore[func-returns-value, assignment]
        found = _numbers(_engine(str(tmp_path), *shape, **changes))
        assert not loaded_whole, "it was loaded whole"
        expected = _numbers(_engine(load_causal_lm(str(tmp_path), **_AS_GIVEN), *shape, **changes))
        assert loaded_whole
        assert found[0] == expected[0]
        assert torch.equal(found[1], expected[1])
        assert found[2].keys() == expected[2].keys()
        for name, value in expected[2].items():
            assert torch.equal(found[2][name], value), name

    run_distributed(both, _size(shape), timeout=120)


_AS_GIVEN: dict[str, Any] = {"trained": True, "gradient_checkpointing": False}


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for part in shape:
        size *= part
    return size


def test_a_value_models_head_starts_at_zero(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)

    def check() -> None:
        engine = _engine(str(tmp_path), 1, 2, kind="value_model")
        weights = dict(engine.get_per_tensor_param())
        assert not weights["score.weight"].any()
        assert torch.equal(weights["model.norm.weight"], tiny_model().get_parameter("model.norm.weight").detach())

    run_distributed(check, 2)


def test_buffers_are_those_of_a_loaded_model(tmp_path: Path) -> None:
    for family in ("qwen3", "llama"):
        model = tiny_model(family=family)  # type: ignore[arg-type]
        model.save_pretrained(tmp_path / family)
        empty = empty_model(tmp_path / family)
        assert empty is not None
        assert all(parameter.is_meta for parameter in empty.parameters())
        expected = dict(model.named_buffers())
        assert "model.rotary_emb.inv_freq" in expected
        for name, value in empty.named_buffers():
            assert torch.equal(value, expected[name]), name


def test_what_is_not_stored_as_the_model_names_it_is_loaded_whole(tmp_path: Path) -> None:
    assert empty_model(tiny_model()) is None
    assert empty_model("an/id") is None
    tiny_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): value for name, value in weights.items()}, tmp_path / "model.safetensors")
    assert empty_model(tmp_path) is None


def test_a_ranks_peak_is_well_below_the_whole_model(tmp_path: Path) -> None:
    """Resident memory, with mapped pages of the files, while the engine is built: 4 ranks, 80 MB of parameters."""
    model = tiny_model(hidden=512, layers=8)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="8MB")
    del model
    tiny_model().save_pretrained(tmp_path / "small")

    def peak(in_shards: bool) -> float:
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, 65536)  # freed memory goes back, so that what is resident is in use
        allocator.malloc_trim(0)
        _engine(str(tmp_path / "small"), 1, 4)  # what torch and transformers import on the way is not the model's
        PackedCausalLM.check = lambda self: None  # type: ignore[method-assign]  # a forward, with memory of its own
        dist.barrier()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        given = str(tmp_path) if in_shards else load_causal_lm(str(tmp_path), **_AS_GIVEN)
        engine = _engine(given, 1, 4)
        used = (_resident("VmHWM") - before) / whole
        assert engine.module is not None
        return used

    sharded = max(run_distributed(peak, 4, True))
    unsharded = min(run_distributed(peak, 4, False))
    print(f"peak of a rank over the whole model: {sharded:.2f} in shards, {unsharded:.2f} loaded whole")
    assert sharded < 0.5, "a quarter is its own"
    assert unsharded > 1.0, "negative control: the measure sees a whole model"


_M_MMAP_THRESHOLD = -3


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
