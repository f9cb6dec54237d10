"""SIGTERM, by which a scheduler ends a run, and SIGINT, by Ctrl-C: each rank notes it, and all stop after the RL step.

Lightning's own handler of SIGTERM (2.6.6, `signal_connector.py`) broadcasts from within the signal. In the middle of
another collective, where a rank of an RL step mostly is, that pairs with whatever the others do next, and all wait for
ever. Python's own of SIGINT raises on the ranks that happen to be told, at any place, and the others wait for those.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

_PATIENCE = b"\nInterrupted: all ranks end after the RL step that they are in. Once more ends this one at once.\n"


class SigtermNote:
    """Takes the place of both handlers until the Trainer, at its end, puts back what it found itself.

    A second SIGINT raises KeyboardInterrupt at once, as the first one does without this.

    Args:
        trainer: with several ranks, its signal handlers registered.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.received = False
        self._interrupted = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)
            # a process that was started to ignore it, in the background of a shell, goes on to
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            signal.default_int_handler(number, frame)
        self._interrupted = True
        os.write(2, _PATIENCE)  # print may be in the middle of another print
        self._receive(number, frame)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        launcher: Any = self._trainer.strategy.launcher
        if not self.received and isinstance(launcher, _SubprocessScriptLauncher):
            # on to the ranks that this one has started; the terminal has perhaps sent them its SIGINT, too
            launcher.kill(signal.SIGTERM)
        self.received = True

    def tell(self) -> None:
        """Has Lightning end the run after this batch, on every rank, if any rank was told to. Collective."""
        flag = torch.tensor(int(self.received), device=self._trainer.strategy.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self._trainer._signal_connector.received_sigterm = bool(flag.item())

    def end(self) -> None:
        """Training is over: SIGINT raises at once again."""
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
