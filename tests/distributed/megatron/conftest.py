"""Imports that every rank of these tests needs, done once before the forks."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def _megatron_is_imported() -> None:
    for name in (
        "megatron.core.distributed",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel",
        "transformers.core_model_loading",
    ):
        importlib.import_module(name)

    from lightning_rlhf.engines.megatron.cpu_compat import cpu_compat

    with cpu_compat():
        pass
