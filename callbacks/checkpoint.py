"""Checkpoints counted in RL steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.strategies.checkpoints import is_complete


class RLCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that saves every so many RL steps, whatever ``global_step`` counts.

    Lightning's ``global_step`` counts every optimizer's steps, several per RL step. Checkpoints are named
    ``rl_step=000010.ckpt``; ``Trainer.fit(ckpt_path="last")`` continues from the newest whole one.

    Args:
        dirpath: folder of the checkpoints; None is ``<default_root_dir>/checkpoints``, the same for every start of a
            run, so that ``"last"`` finds them.
        every_n_rl_steps: RL steps between two checkpoints; the last RL step is saved too.
        save_top_k: 1 keeps the newest, -1 keeps all, 0 saves none.
    """

    def __init__(self, *, dirpath: str | Path | None = None, every_n_rl_steps: int = 10, save_top_k: int = 1) -> None:
        if every_n_rl_steps < 1:
            raise ValueError(f"every_n_rl_steps must be at least 1, got {every_n_rl_steps}.")
        super().__init__(
            dirpath=dirpath,
            filename="{rl_step:06d}",
            save_top_k=save_top_k,
            every_n_train_steps=0,
            every_n_epochs=0,
            enable_version_counter=False,
        )
        self.every_n_rl_steps = every_n_rl_steps
        self._last_rl_step_saved = -1

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.dirpath = str(self._directory(trainer))
        self._last_rl_step_saved = -1
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = as_on_policy(pl_module, callback=self)
        if module.rl_step % self.every_n_rl_steps == 0 or module.finished:
            self._save_rl_step(trainer, module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save_rl_step(trainer, as_on_policy(pl_module, callback=self))

    def _save_rl_step(self, trainer: pl.Trainer, module: OnPolicyModule) -> None:
        saved = module.rl_step in (0, self._last_rl_step_saved)
        if saved or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._last_rl_step_saved = module.rl_step
        self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    @override
    def _monitor_candidates(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        candidates = super()._monitor_candidates(trainer)
        return {**candidates, "rl_step": torch.tensor(as_on_policy(trainer.lightning_module, callback=self).rl_step)}

    @override
    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        directory = self._directory(trainer)
        found = [(int(match[1]), path) for path in directory.glob("*.ckpt") if (match := _NAME.match(path.name))]
        # one file of a plain strategy is a zip archive, whose directory is written last
        whole = [(n, path) for n, path in found if (is_complete(path) if path.is_dir() else is_zipfile(path))]
        passed_over = sorted({path.name for _, path in found} - {path.name for _, path in whole})
        if passed_over:
            rank_zero_warn(
                f"{directory} holds checkpoints that are not whole: {', '.join(passed_over)}; they are ignored."
            )
        # by its number, not by its time: copying a run's folder must not change what "last" means
        return {str(max(whole)[1])} if whole else set()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = _NAME.match(Path(self.best_model_path).name)
        self._last_rl_step_saved = int(saved[1]) if saved else -1

    def _directory(self, trainer: pl.Trainer) -> Path:
        return Path(self.dirpath) if self.dirpath is not None else Path(trainer.default_root_dir) / "checkpoints"


_NAME = re.compile(r"rl_step=(\d+)\.ckpt$")
