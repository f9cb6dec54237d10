"""A trainer rank that hangs in the middle of a push's gather: Trainer.fit ends on the others, with its number."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.fork import run_distributed
from support.toy import toy_data, toy_module, toy_trainer
from torch import Tensor

from lightning_rlhf.callbacks import WeightSync
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.modules import OnPolicyModule
from lightning_rlhf.weights.roll_call import TrainerRankLostError

LIMIT = 3.0
HANG = 9.0


class HangInGather(RLCallback):
    """On rank 1, the third tensor of the push after the second step."""

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        assert isinstance(pl_module, OnPolicyModule)
        if trainer.global_rank != 1 or step.rl_step != 1:
            return
        gather = pl_module.actor.get_per_tensor_param

        def hanging() -> Iterator[tuple[str, Tensor]]:
            for index, named_tensor in enumerate(gather()):
                time.sleep(HANG if index == 2 else 0.0)
                yield named_tensor

        pl_module.actor.get_per_tensor_param = hanging  # type: ignore[method-assign]


def _fit(root: Path, model: Path) -> dict[str, Any]:
    callbacks = [HangInGather(), WeightSync(timeout=LIMIT)]
    trainer = toy_trainer(root, callbacks=callbacks, weight_sync=False, strategy="fsdp2_rl", devices=2)
    module = toy_module(model)
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(module, toy_data())
    if os.environ["RANK"] == "0":
        assert isinstance(caught.value, TrainerRankLostError)
    return {"seconds": time.monotonic() - begun, "text": str(caught.value), "rl_step": module.rl_step}


def test_the_push_ends_within_its_timeout_and_the_rank_is_named(tmp_path: Path, tiny_directory: Path) -> None:
    first, _ = run_distributed(_fit, 2, tmp_path, tiny_directory, init_process_group=False, timeout=90.0)
    assert "phase 'gather'" in first["text"]
    assert "rank 1 did not come" in first["text"]
    assert first["rl_step"] == 1
    assert first["seconds"] < 2 * LIMIT + 20.0
