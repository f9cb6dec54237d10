"""Random state that survives a checkpoint."""

from __future__ import annotations

import io
import random

import numpy as np
import torch

from lightning_rlhf.rng import capture_rng, preserved_rng, restore_rng


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))  # noqa: NPY002


def test_a_saved_state_gives_the_same_draws_again() -> None:
    buffer = io.BytesIO()
    torch.save(capture_rng(), buffer)
    expected = [_draw() for _ in range(3)]
    buffer.seek(0)
    restore_rng(torch.load(buffer, weights_only=True))
    assert [_draw() for _ in range(3)] == expected


def test_preserved_rng_hides_what_happens_inside() -> None:
    state = capture_rng()
    expected = _draw()
    restore_rng(state)
    with preserved_rng():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        _draw()
    assert _draw() == expected
