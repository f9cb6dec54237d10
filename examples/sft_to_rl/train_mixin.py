"""GRPO in the team's own module: python train_mixin.py CHECKPOINT OUT."""

from __future__ import annotations

import sys

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from module import CausalLMModule
from rewards import right_sum, sums

import lightning_rlhf as rl


class RLModule(rl.GRPOMixin, CausalLMModule):
    def rl_arguments(self) -> dict:
        return {"reward": right_sum}


def main(source: str, out: str) -> None:
    pl.seed_everything(0)
    module = RLModule.load_from_checkpoint(source, lr=3e-3)
    data = rl.PromptDataModule(sums(), prompts_per_step=8)
    callbacks = [LearningRateMonitor("step"), rl.HFRollout(max_new_tokens=4), rl.WeightSync()]
    trainer = pl.Trainer(max_epochs=5, logger=CSVLogger(out), log_every_n_steps=1, callbacks=callbacks)
    trainer.fit(module, data)
    trainer.save_checkpoint(f"{out}/model.ckpt")


if __name__ == "__main__":
    main(*sys.argv[1:])
