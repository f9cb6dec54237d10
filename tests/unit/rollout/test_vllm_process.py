from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from lightning_rlhf.rollout.vllm_process import (
    default_group,
    fenced_process,
    guarded_groups,
    import_vllm,
)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    built_in = default_group()
    assert built_in is not None
    yield built_in
    if dist.is_initialized():
        dist.destroy_process_group()


def test_environment_threads_and_rng_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    before, set_num_threads, state = dict(os.environ), torch.set_num_threads, torch.get_rng_state()
    with fenced_process():
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
        os.environ.update(RANK="0", NEW="1")
        torch.set_num_threads(2)
        torch.set_num_threads = lambda count: None  # type: ignore[assignment]
        torch.manual_seed(5)
    assert dict(os.environ) == before
    assert torch.set_num_threads is set_num_threads
    assert torch.get_num_threads() == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_comes_back_after_an_error_too() -> None:
    before = dict(os.environ)
    with pytest.raises(KeyError), fenced_process():
        raise KeyError
    assert dict(os.environ) == before


def test_default_group_started_inside_is_gone() -> None:
    with fenced_process():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_default_group_that_was_there_stays(group: dist.ProcessGroup) -> None:
    with fenced_process():
        pass
    assert default_group() is group


def test_guard_destroys_subgroups_and_never_the_default_group(group: dist.ProcessGroup) -> None:
    subgroup = dist.new_group([0])
    destroy = dist.destroy_process_group
    with guarded_groups(group):
        dist.destroy_process_group(subgroup)
        dist.destroy_process_group()
        dist.destroy_process_group(group)
    assert dist.destroy_process_group is destroy
    assert default_group() is group
    with pytest.raises((ValueError, AssertionError)):
        dist.get_backend(subgroup)


def test_guard_leaves_groups_of_another_time_alone(group: dist.ProcessGroup) -> None:
    subgroup = dist.new_group([0])
    dist.destroy_process_group()  # the subgroup is gone with it; destroying it again would raise
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with guarded_groups(group):
        dist.destroy_process_group(subgroup)
        dist.destroy_process_group()
    assert default_group() is not None


def test_missing_vllm_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_vllm(name: str, package: str | None = None) -> ModuleType:
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError("No module named 'vllm'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_vllm)
    with pytest.raises(ImportError, match=r"lightning_rlhf\[vllm-cpu\].*lightning_rlhf\[vllm\]"):
        import_vllm()
