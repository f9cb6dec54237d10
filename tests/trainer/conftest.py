"""A tiny model on disk, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a tiny model and its character tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
