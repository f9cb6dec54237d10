"""Checkpoints counted in RL steps: the newest, and the best by a metric."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile, ZipFile

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.strategies.base import RLStrategy
from lightning_rlhf.strategies.checkpoints import damaged_files, is_complete

WANDB_RUN_ID = "wandb_run_id"
"""Entry of the callback's state: the run that a resumed one goes on in."""
SCORES = "scores.json"
"""Beside the checkpoints: the metric of each one that is kept for it."""
READ_THROUGH_BYTES = 4 * 2**30
"""A checkpoint of at most this size is read through before ``ckpt_path="last"`` chooses it."""


class RLCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that saves every so many RL steps, whatever ``global_step`` counts.

    Lightning's ``global_step`` counts every optimizer's steps, several per RL step. Checkpoints are named
    ``rl_step=000010.ckpt``; ``Trainer.fit(ckpt_path="last")`` continues from the newest whole one, and names those
    that it passes over. An older checkpoint is removed only once the new one stands; under a strategy with
    ``async_save=True`` that is at the next save or the end of training.

    A checkpoint holds every trained engine with its optimizer and schedule, the KL controller, the data's position,
    each rank's random state, RL step and policy version, the state of callbacks, and the id of the W&B run.

    Args:
        dirpath: folder of the checkpoints; None is ``<default_root_dir>/checkpoints``, the same for every start of a
            run, so that ``"last"`` finds them.
        every_n_rl_steps: RL steps between two checkpoints; the last RL step is saved too.
        save_top_k: how many of the newest are kept; -1 keeps all, 0 saves none.
        save_best: how many of the best are kept beside them; ``ckpt_path="best"`` is the best of all.
        monitor: what is best: a metric of the RL step that is saved (``reward/mean``), or of the validation that
            follows it (``val/reward``). A checkpoint without a finite value is no candidate; an equal one keeps its
            place.
        mode: whether the largest or the smallest value is best.

    Raises:
        ValueError: for numbers out of range.
    """

    def __init__(
        self,
        *,
        dirpath: str | Path | None = None,
        every_n_rl_steps: int = 10,
        save_top_k: int = 1,
        save_best: int = 0,
        monitor: str = "reward/mean",
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if every_n_rl_steps < 1:
            raise ValueError(f"every_n_rl_steps must be at least 1, got {every_n_rl_steps}.")
        if save_top_k < -1 or save_best < 0:
            raise ValueError(f"save_top_k must be -1 or more and save_best 0 or more, got {save_top_k}, {save_best}.")
        if save_best and save_top_k == 0:
            raise ValueError(
                "save_best keeps some of the checkpoints that save_top_k saves; with save_top_k=0 none is."
            )
        if mode not in ("max", "min"):
            raise ValueError(f"mode must be 'max' or 'min', got {mode!r}.")
        super().__init__(
            dirpath=dirpath, save_top_k=-1, every_n_train_steps=0, every_n_epochs=0, enable_version_counter=False
        )
        self.every_n_rl_steps = every_n_rl_steps
        self.save_top_k = save_top_k
        self.save_best = save_best
        self.score_name = monitor
        self.mode = mode
        self.scores: dict[str, float] = {}
        self._last_rl_step_saved = -1
        self._run_id: str | None = None

    @property
    @override
    def state_key(self) -> str:
        return f"RLCheckpoint{{'every_n_rl_steps': {self.every_n_rl_steps}}}"

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.dirpath = str(self._directory(trainer))
        self._last_rl_step_saved = -1
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        ids = [logger.version for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        self._run_id = next((str(run) for run in ids if run is not None), None)
        # a run that starts anew has no best yet, whatever an earlier one has left here
        self.scores = {} if trainer.ckpt_path is None else self._read_scores(self._directory(trainer))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = as_on_policy(pl_module, callback=self)
        if module.rl_step % self.every_n_rl_steps == 0 or module.finished:
            self._save_rl_step(trainer, module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        value = trainer.callback_metrics.get(self.score_name)
        module = as_on_policy(pl_module, callback=self)
        saved = module.rl_step == self._last_rl_step_saved
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if not fitting or value is None or not saved:
            return
        self._keep(trainer, module.rl_step, float(value))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: epochs do not count."""

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = as_on_policy(pl_module, callback=self)
        self._save_rl_step(trainer, module)
        self._settle_pending(trainer, module.rl_step)

    def _save_rl_step(self, trainer: pl.Trainer, module: OnPolicyModule) -> None:
        saved = module.rl_step in (0, self._last_rl_step_saved)
        if saved or self.save_top_k == 0 or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._settle_pending(trainer, module.rl_step)
        self._last_rl_step_saved = module.rl_step
        path = self._directory(trainer) / f"rl_step={module.rl_step:06d}.ckpt"
        self._save_checkpoint(trainer, str(path))
        self.last_model_path = str(path)
        if not self.save_best:
            self.best_model_path = str(path)
        self._keep(trainer, module.rl_step, module.last_metrics.get(self.score_name, math.nan))

    def _keep(self, trainer: pl.Trainer, rl_step: int, score: float) -> None:
        """Notes the score of the checkpoint that was just saved, and removes those that are no longer kept."""
        if self.save_best and math.isfinite(score):
            candidates = {**self.scores, f"rl_step={rl_step:06d}.ckpt": score}
            self.scores = dict(self._ranked(candidates)[: self.save_best])
            self.best_model_path = str(self._directory(trainer) / next(iter(self.scores)))
        strategy = trainer.strategy
        # one that is still being written may yet fail: until it stands, the others are as they were
        if not (isinstance(strategy, RLStrategy) and strategy.background.pending):
            self._settle(trainer, rl_step)

    def _settle_pending(self, trainer: pl.Trainer, rl_step: int) -> None:
        """Waits for a checkpoint that is written beside training, and does what ``_keep`` has put off."""
        if isinstance(trainer.strategy, RLStrategy) and trainer.strategy.finish_save():
            self._settle(trainer, rl_step)

    def _settle(self, trainer: pl.Trainer, rl_step: int) -> None:
        """Writes down which are the best, and removes those that are kept neither as such nor as the newest."""
        if not trainer.is_global_zero:
            return
        folder = self._directory(trainer)
        if self.scores:
            self._write_scores(folder)
        if self.save_top_k == -1:
            return
        known = {int(match[1]): path for path in folder.glob("*.ckpt") if (match := _NAME.match(path.name))}
        # those of a higher number are not this run's to remove: it has not come that far
        older = sorted(step for step in known if step <= rl_step)
        for step in older[: -self.save_top_k]:
            if known[step].name not in self.scores and is_whole(known[step]):
                trainer.strategy.remove_checkpoint(known[step])

    def _ranked(self, scores: dict[str, float]) -> list[tuple[str, float]]:
        """The best first; of equal ones the older."""
        sign = -1.0 if self.mode == "max" else 1.0
        return sorted(scores.items(), key=lambda item: (sign * item[1], item[0]))

    def _read_scores(self, folder: Path) -> dict[str, float]:
        file = folder / SCORES
        if not self.save_best or not file.is_file():
            return {}
        stored = json.loads(file.read_text(encoding="utf-8"))
        if (stored["monitor"], stored["mode"]) != (self.score_name, self.mode):
            rank_zero_warn(
                f"{file} ranks checkpoints by {stored['monitor']} ({stored['mode']}), this run by {self.score_name} "
                f"({self.mode}): which of the earlier ones is best is not known."
            )
            return {}
        found = {name: float(score) for name, score in stored["scores"].items() if is_whole(folder / name)}
        scores = dict(self._ranked(found)[: self.save_best])
        if scores:
            self.best_model_path = str(folder / next(iter(scores)))
        return scores

    def _write_scores(self, folder: Path) -> None:
        part = folder / (SCORES + ".part")
        stored = {"monitor": self.score_name, "mode": self.mode, "scores": self.scores}
        with part.open("w", encoding="utf-8") as file:
            json.dump(stored, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / SCORES)

    @override
    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        directory = self._directory(trainer)
        found = [(int(match[1]), path) for path in directory.glob("*.ckpt") if (match := _NAME.match(path.name))]
        passed_over: list[str] = []
        # by its number, not by its time: copying a run's folder must not change what "last" means
        for _, path in sorted(found, reverse=True):
            reason = fault_of(path)
            if reason is None:
                self._tell(directory, passed_over)
                return {str(path)}
            passed_over.append(f"{path.name} ({reason})")
        self._tell(directory, passed_over)
        return set()

    @staticmethod
    def _tell(directory: Path, passed_over: list[str]) -> None:
        if passed_over:
            rank_zero_warn(
                f"{directory} holds checkpoints that are not whole: {', '.join(passed_over)}; they are ignored."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last_rl_step_saved": self._last_rl_step_saved, WANDB_RUN_ID: self._run_id}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_rl_step_saved = state_dict["last_rl_step_saved"]
        self._run_id = state_dict[WANDB_RUN_ID]

    def _directory(self, trainer: pl.Trainer) -> Path:
        return Path(self.dirpath) if self.dirpath is not None else Path(trainer.default_root_dir) / "checkpoints"


def is_whole(checkpoint: Path) -> bool:
    """Whether all of a checkpoint is there; what its files hold is not read."""
    if checkpoint.is_dir():
        return is_complete(checkpoint)
    # one file of a plain strategy is a zip archive, whose directory is written last
    try:
        with ZipFile(checkpoint) as archive:
            return bool(archive.namelist())
    except (OSError, BadZipFile):
        return False


def fault_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: files missing or cut short, or, if it is not too large to read, changed."""
    if not is_whole(checkpoint):
        return "cut short or never finished"
    if checkpoint.is_dir():
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        damaged = damaged_files(checkpoint) if size <= READ_THROUGH_BYTES else []
        return f"damaged: {', '.join(damaged)}" if damaged else None
    if checkpoint.stat().st_size > READ_THROUGH_BYTES:
        return None
    with ZipFile(checkpoint) as archive:
        try:
            damaged_member = archive.testzip()
        except BadZipFile as error:
            return f"damaged: {error}"
    return None if damaged_member is None else f"damaged: {damaged_member}"


_NAME = re.compile(r"rl_step=(\d+)\.ckpt$")
