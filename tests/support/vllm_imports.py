"""Imports vLLM once, in the test's process: its forks have it then, and start in a fraction of the time."""

from __future__ import annotations

import pytest

from lightning_rlhf.rollout.vllm_process import fenced_process, import_vllm


@pytest.fixture(scope="session", autouse=True)
def vllm_is_imported() -> None:
    """For every test of a module that imports this name, before its ranks are forked."""
    with fenced_process():
        import_vllm()
