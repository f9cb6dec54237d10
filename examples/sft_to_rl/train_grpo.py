"""GRPO on the model of a fine-tuning checkpoint: python train_grpo.py CHECKPOINT OUT."""

from __future__ import annotations

import sys
from functools import partial

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from module import CausalLMModule
from rewards import right_sum, sums

import lightning_rlhf as rl


def main(source: str, out: str) -> None:
    pl.seed_everything(0)
    sft = CausalLMModule.load_from_checkpoint(source)
    adam = partial(torch.optim.AdamW, lr=3e-3)
    module = rl.GRPO(model=sft.model, tokenizer=sft.tokenizer, reward=right_sum, optimizer=adam)
    data = rl.PromptDataModule(sums(), prompts_per_step=8)
    callbacks = [LearningRateMonitor("step"), rl.HFRollout(max_new_tokens=4), rl.WeightSync()]
    trainer = pl.Trainer(max_epochs=5, logger=CSVLogger(out), log_every_n_steps=1, callbacks=callbacks)
    trainer.fit(module, data)
    trainer.save_checkpoint(f"{out}/model.ckpt")


if __name__ == "__main__":
    main(*sys.argv[1:])
