from __future__ import annotations

import pytest
import torch

from lightning_rlhf.rewards import soft_overlong_penalty


def test_dapos_three_pieces() -> None:
    """Limit 20, cache 4: free up to 16 tokens, then a quarter per token."""
    lengths = torch.tensor([0, 15, 16, 17, 18, 19, 20, 21, 100])
    penalties = soft_overlong_penalty(lengths, 20, 4)
    assert penalties.tolist() == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert penalties.dtype == torch.float32


def test_the_papers_lengths() -> None:
    assert soft_overlong_penalty(torch.tensor([16384, 18432, 20480]), 20480, 4096).tolist() == [0, -0.5, -1]


@pytest.mark.parametrize(("limit", "cache"), [(20, 0), (20, 21), (0, 0)])
def test_refuses(limit: int, cache: int) -> None:
    with pytest.raises(ValueError, match=f"got cache_length={cache} and max_length={limit}"):
        soft_overlong_penalty(torch.tensor([1]), limit, cache)
