"""SIGTERM, by which a scheduler ends a run: each rank notes it, and all stop together after the RL step.

Lightning's own handler (2.6.6, `signal_connector.py`) broadcasts from within the signal. In the middle of another
collective, where a rank of an RL step mostly is, that pairs with whatever the others do next, and all wait for ever.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher


class SigtermNote:
    """Takes the place of Lightning's handler until the Trainer, at its end, puts back what it found itself.

    Args:
        trainer: with several ranks, its signal handlers registered.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.received = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        launcher: Any = self._trainer.strategy.launcher
        if not self.received and isinstance(launcher, _SubprocessScriptLauncher):
            launcher.kill(signal.SIGTERM)  # on to the ranks that this one has started
        self.received = True

    def tell(self) -> None:
        """Has Lightning end the run after this batch, on every rank, if any rank was told to. Collective."""
        flag = torch.tensor(int(self.received), device=self._trainer.strategy.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self._trainer._signal_connector.received_sigterm = bool(flag.item())
