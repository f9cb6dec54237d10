"""Where an engine's parts are between its uses: on the device, or in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_rlhf.contracts.engine import BaseEngine

HOST = torch.device("cpu")


class Residence:
    """Brings an engine's parts to its device for a mode and, as its config asks, back to the host after it.

    Modes may stand in one another; the outermost one's end takes the parts out, also after an exception. Gradients lie
    where their parameters do, so they go with them.

    Args:
        engine: whose ``to`` moves the parts; its config names those that leave.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self._engine = engine
        self._depth = 0

    @contextmanager
    def on_device(self, *, optimizer: bool) -> Iterator[None]:
        """Within it the parameters are on the device, with ``optimizer`` gradients and optimizer state as well."""
        self._engine.to(self._engine.device, optimizer=optimizer)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.leave()

    def leave(self) -> None:
        """Takes the parts to the host that the config names."""
        model, optimizer = self._engine.config.offload_model, self._engine.config.offload_optimizer
        if model or optimizer:
            self._engine.to(HOST, model=model, optimizer=optimizer, grad=model)

    @contextmanager
    def reachable(self, *, optimizer: bool = False) -> Iterator[None]:
        """Within it parts that the config offloads are on the device; where it offloads none, all stay as they are."""
        config = self._engine.config
        if not (config.offload_model or config.offload_optimizer):
            yield
            return
        with self.on_device(optimizer=optimizer):
            yield
