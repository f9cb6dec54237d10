"""Where parts lie before the first use; modes are held by the engines' contract."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.tiny import tiny_model

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.torch import TorchEngine


class _Recorded(TorchEngine):
    moves: list[tuple[bool, bool, bool]]

    def to(self, device: torch.device, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        assert self.optimizer is not None  # of parameters on the device, before they leave
        self.moves.append((model, optimizer, grad))
        super().to(device, model=model, optimizer=optimizer, grad=grad)


@pytest.mark.parametrize(
    ("model", "optimizer", "left"),
    [
        (True, True, [(True, True, True)]),
        (True, False, [(True, False, True)]),
        (False, True, [(False, True, False)]),
        (False, False, []),
    ],
)
def test_an_engine_leaves_the_device_once_it_is_built(
    model: bool, optimizer: bool, left: list[tuple[bool, bool, bool]]
) -> None:
    config = EngineConfig(
        model=tiny_model(),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        offload_model=model,
        offload_optimizer=optimizer,
    )
    engine = _Recorded(config, device=torch.device("cpu"))
    engine.moves = []
    engine.initialize()
    assert engine.moves == left
