"""What a user says about a low-rank adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """A low-rank adapter (Hu et al., arXiv:2106.09685): ``W + scale * B @ A`` with ``W`` frozen.

    ``B`` starts at zero, so training begins at the model that was given. There is no dropout: log-probs in training
    would not be those of the policy that sampled the tokens.

    Attributes:
        rank: columns of ``B`` and rows of ``A``.
        alpha: ``scale = alpha / rank``.
        target_modules: names of the linear layers that get one, as peft takes them: endings of module names, a regular
            expression, or ``"all-linear"`` for all but the head.
        root_rank: ``scale = alpha / sqrt(rank)`` instead (rsLoRA, arXiv:2312.03732).
        seed: draws ``A``; the same on every rank, and apart from the run's random state.

    Raises:
        ValueError: for numbers that cannot be meant.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | Sequence[str] = "all-linear"
    root_rank: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses sizes that cannot be meant."""
        if self.rank < 1 or self.alpha <= 0 or self.seed < 0:
            raise ValueError(
                f"LoRAConfig needs rank >= 1, alpha > 0 and seed >= 0, got rank={self.rank}, alpha={self.alpha}, "
                f"seed={self.seed}."
            )
