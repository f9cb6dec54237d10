"""The dtype that a Trainer's precision stands for."""

from __future__ import annotations

import torch

COMPUTE_DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
"""By ``Trainer(precision=)``, the dtype of an engine's forward and backward."""


def compute_dtype_of(precision: object, *, strategy: str) -> torch.dtype:
    """The dtype that an engine computes in under a Trainer's precision.

    Args:
        precision: ``trainer.precision``, or a precision plugin's.
        strategy: the strategy's name, for the message.

    Raises:
        ValueError: for a precision that would change what the optimizer updates.
    """
    if precision not in COMPUTE_DTYPES:
        raise ValueError(
            f"Trainer(precision={precision!r}) does not work with {strategy}; choose "
            f"{' or '.join(map(repr, COMPUTE_DTYPES))}. Parameters and optimizer state stay fp32 in both."
        )
    return COMPUTE_DTYPES[str(precision)]
