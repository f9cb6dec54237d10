"""vLLM engines of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_rlhf.rollout.vllm import VLLMEngine


@pytest.fixture
def engines() -> Iterator[list[VLLMEngine]]:
    """Shuts down what a test puts in."""
    built: list[VLLMEngine] = []
    yield built
    for engine in built:
        engine.shutdown()
