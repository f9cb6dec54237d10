"""What every callback of an RL run asks of the module that it is attached to."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_rlhf.modules.on_policy import OnPolicyModule


def as_on_policy(pl_module: pl.LightningModule, *, callback: pl.Callback) -> OnPolicyModule:
    """The module, known to count RL steps and to keep their metrics.

    Raises:
        TypeError: for another kind of LightningModule.
    """
    if not isinstance(pl_module, OnPolicyModule):
        raise TypeError(
            f"{type(callback).__name__} reads the RL steps of an OnPolicyModule such as rl.GRPO, got "
            f"{type(pl_module).__name__}; remove the callback, or use it with an RL module."
        )
    return pl_module
