"""LightningCLI over any module and data module.

python cli.py fit --config sft.yaml --model.model_name MODEL --data.model_name MODEL
python cli.py fit --config grpo.yaml --model.model_name MODEL
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
    )
