"""The CPU compatibility layer is there inside its scope alone, and never where CUDA is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lightning_rlhf.engines.megatron.backend import choose_backend
from lightning_rlhf.engines.megatron.cpu_compat import cpu_compat


def everything() -> dict[str, Any]:
    """What torch.cuda and the modules of megatron that the layer touches look like at the moment."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    owners = [torch.cuda, writer, distrib_optimizer, mappings, megatron_random, moe_utils, token_dispatcher]
    owners += [distrib_optimizer.DistributedOptimizer, torch, torch.Tensor]
    found = {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}
    found["filters"] = list(logging.getLogger(megatron_random.__name__).filters)
    return found


def changed(before: dict[str, Any]) -> set[str]:
    now = everything()
    return {name for name in before.keys() | now.keys() if before.get(name) is not now.get(name)} - {"filters"}


@pytest.fixture(autouse=True)
def _imported() -> None:
    with cpu_compat():
        torch.cuda.current_device()  # torch fills caches of its own on first use


def test_nothing_is_left_after_the_scope() -> None:
    before = everything()
    with cpu_compat():
        inside = changed(before)
        assert {"torch.cuda.current_device", "torch.cuda.Stream"} < inside
        assert any(name.endswith("mappings._gather_along_first_dim") for name in inside)
        assert torch.cuda.current_device() == torch.device("cpu")
    assert changed(before) == set()
    assert everything()["filters"] == before["filters"]


def test_scopes_may_be_nested() -> None:
    before = everything()
    with cpu_compat():
        outer = changed(before)
        with cpu_compat():
            assert changed(before) == outer
        assert changed(before) == outer
    assert changed(before) == set()


def test_an_error_ends_the_scope() -> None:
    before = everything()
    with pytest.raises(ZeroDivisionError), cpu_compat():
        raise ZeroDivisionError
    assert changed(before) == set()


def test_devices_lie_on_the_cpu_inside_alone() -> None:
    with cpu_compat():
        made = torch.zeros(2, device="cuda", pin_memory=True)
        assert made.device.type == "cpu"
        assert made.cuda() is made
        assert made.type() == "torch.cuda.FloatTensor"
        assert made.type(torch.float64).dtype == torch.float64
    assert made.type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_megatron_random_states_come_from_the_cpu_and_the_outer_one_stays() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with cpu_compat():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        tracker = CudaRNGStatesTracker()
        tracker.add("own", 7)
        with tracker.fork("own"):
            first = torch.rand(3)
        with tracker.fork("own"):
            second = torch.rand(3)
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert not torch.equal(first, second)


def test_never_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="machine with CUDA"), cpu_compat():
        pass
    with pytest.raises(RuntimeError, match="only where CUDA is not available"):
        choose_backend("cpu")
    monkeypatch.undo()
    assert changed(before) == set()


def test_cuda_is_refused_without_it() -> None:
    with pytest.raises(RuntimeError, match="CUDA, which is not available"):
        choose_backend("cuda")
    with pytest.raises(ValueError, match="'cpu' or 'cuda', got 'tpu'"):
        choose_backend("tpu")


def test_transformer_engine_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ImportError, match=r"lightning_rlhf\[megatron-cuda\]"):
        choose_backend("cuda")
