"""A causal language model and how it is fine-tuned."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class CausalLMModule(pl.LightningModule):
    """Supervised fine-tuning of a Hugging Face model.

    Args:
        model_name: a directory or an id.
        lr: peak learning rate of AdamW.
        warmup_steps: optimizer steps over which the learning rate rises.
    """

    def __init__(self, model_name: str, lr: float = 1e-3, warmup_steps: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokenizer = AutoTokenizer.from_pretrained(model_name)
        self.model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self(batch))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.0)
        warmup = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / self.hparams.warmup_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
