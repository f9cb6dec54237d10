"""Supervised fine-tuning: python train_sft.py MODEL OUT."""

from __future__ import annotations

import sys

import lightning.pytorch as pl
from data import SumsDataModule
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from module import CausalLMModule


def main(source: str, out: str) -> None:
    pl.seed_everything(0)
    module = CausalLMModule(source, lr=3e-3)
    data = SumsDataModule(source)
    callbacks = [LearningRateMonitor("step")]
    trainer = pl.Trainer(max_epochs=5, logger=CSVLogger(out), log_every_n_steps=1, callbacks=callbacks)
    trainer.fit(module, data)
    trainer.save_checkpoint(f"{out}/model.ckpt")


if __name__ == "__main__":
    main(*sys.argv[1:])
