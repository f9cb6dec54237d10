"""Imports megatron-core once, in the test's process: its forks have it then, and start in a fraction of the time."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def megatron_is_imported() -> None:
    """For every test of a module that imports this name, before its ranks are forked."""
    for name in (
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "megatron.core.distributed",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel",
        "megatron.core.transformer.moe.token_dispatcher",
        "transformers.core_model_loading",
    ):
        importlib.import_module(name)

    from lightning_rlhf.engines.megatron.cpu_compat import cpu_compat

    with cpu_compat():
        pass
