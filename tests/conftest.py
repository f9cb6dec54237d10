"""What every test gets: one thread, no network, and a check that it leaves nothing behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork

import pytest
import torch
import torch.distributed as dist

from lightning_rlhf.cli import prepare_smollm2

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that are marked gpu on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Path:
    """The directory of SmolLM2-135M-Instruct, fp32, which `make train` shares; converted if it is not there."""
    path = pytestconfig.rootpath / "models" / "SmolLM2-135M-Instruct"
    prepare_smollm2.prepare(path)
    return path


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """Restore ``os.environ`` after the test, and fail it if it leaves a process group."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name != "PYTEST_CURRENT_TEST"})
    if (layout := sys.modules.get("lightning_rlhf.engines.megatron.layout")) and "megatron.core" in sys.modules:
        layout.destroy_groups()  # of a test that runs megatron in this process: later ones fork from it
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("The test left torch.distributed initialised: destroy its process group, or use run_distributed.")
