"""Rewards that speak of a response's length alone."""

from __future__ import annotations

from torch import Tensor


def soft_overlong_penalty(response_lengths: Tensor, max_length: int, cache_length: int) -> Tensor:
    r"""DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), to be added to a reward.

    0 up to ``max_length - cache_length`` tokens, then falling linearly to -1 at ``max_length``, and -1 beyond.

    Args:
        response_lengths: any shape, tokens.
        max_length: tokens, the length limit of a response.
        cache_length: tokens before the limit over which the penalty grows.

    Returns:
        fp32 in the shape of ``response_lengths``, -1 to 0.

    Raises:
        ValueError: unless ``1 <= cache_length <= max_length``.
    """
    if not 1 <= cache_length <= max_length:
        raise ValueError(
            f"The penalty grows over the last cache_length of max_length tokens, and needs 1 <= cache_length <= "
            f"max_length; got cache_length={cache_length} and max_length={max_length}."
        )
    return ((max_length - cache_length - response_lengths.float()) / cache_length).clamp(-1.0, 0.0)
