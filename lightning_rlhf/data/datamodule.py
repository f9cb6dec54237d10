"""The data module: from a prompt source to each rank's batches."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_rlhf.data.encode import EncodedPrompt, LengthReport, Overlong, encode_prompts
from lightning_rlhf.data.loader import PromptDataLoader, PromptDataset, collate_prompts
from lightning_rlhf.data.prompts import PromptSource
from lightning_rlhf.data.sampler import PromptSampler, check_batch_size
from lightning_rlhf.types import PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class PromptDataModule(pl.LightningDataModule):
    """Prompts for RL: loaded and encoded once, before any model, then shared out by data-parallel rank.

    Each step takes ``prompts_per_step`` prompts over all ranks. Nothing is repeated to fill up; the last incomplete
    step of an epoch is left out, another one each epoch if ``shuffle``. The position is part of the checkpoint, in
    global prompts, so a run can go on with another number of ranks.

    Args:
        source: where the training prompts come from.
        prompts_per_step: prompts of one RL step over all data-parallel ranks.
        max_prompt_tokens: most tokens of a prompt, chat template included; None for no limit.
        overlong: what happens to a longer prompt: ``error`` stops before any model is loaded, ``drop`` leaves it out,
            ``truncate_left`` keeps its last ``max_prompt_tokens`` tokens. The latter two are counted and logged.
        tokenizer: a tokenizer, or the directory or id to load it from; None takes the LightningModule's ``tokenizer``.
        shuffle: whether each epoch has its own order.
        seed: of the orders.
        val_source: where the prompts of validation and test come from; never shuffled, under the same length rule.
        val_prompts_per_step: as ``prompts_per_step``; None takes that number, or what there is if that is less.
        chat_template_kwargs: further variables of the chat template.

    Attributes:
        length_reports: what the length rule did, under ``train`` and ``val``; filled by ``setup``.
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        prompts_per_step: int,
        max_prompt_tokens: int | None = None,
        overlong: Overlong = "error",
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        shuffle: bool = True,
        seed: int = 0,
        val_source: PromptSource | None = None,
        val_prompts_per_step: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(source, (str, Path, Sequence)):
            raise TypeError(
                f"source must say where prompts come from, got {type(source).__name__}. Use rl.JSONLPrompts(path) for "
                "a file, ListPrompts([...]) of lightning_rlhf.data for a list, or rl.ReasoningGymPrompts(...)."
            )
        if overlong not in get_args(Overlong):
            raise ValueError(f"overlong must be one of {', '.join(get_args(Overlong))}, got {overlong!r}.")
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1, got {max_prompt_tokens}.")
        self.source = source
        self.prompts_per_step = prompts_per_step
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong: Overlong = overlong
        self.tokenizer = tokenizer
        self.shuffle = shuffle
        self.seed = seed
        self.val_source = val_source
        self.val_prompts_per_step = val_prompts_per_step
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.length_reports: dict[str, LengthReport] = {}
        self._train_prompts: PromptDataset | None = None
        self._val_prompts: PromptDataset | None = None
        self._train_loader: PromptDataLoader | None = None
        self._restored: dict[str, Any] | None = None

    @override
    def setup(self, stage: str) -> None:
        """Loads and encodes the prompts, once; every fault of theirs shows here, before a model is loaded."""
        num_replicas, _ = self._data_parallel()
        if stage == "fit" and self._train_prompts is None:
            self._refuse_what_the_trainer_would_break()
            prompts = self._encode(self.source, "train")
            check_batch_size(len(prompts), prompts_per_step=self.prompts_per_step, num_replicas=num_replicas)
            self._train_prompts = prompts
        if stage == "test" and self.val_source is None:
            raise ValueError("Trainer.test needs prompts: give PromptDataModule(val_source=...).")
        if stage in ("fit", "validate", "test") and self.val_source is not None and self._val_prompts is None:
            self._val_prompts = self._encode(self.val_source, "val")
            self._check_val(self._val_prompts)

    @override
    def train_dataloader(self) -> PromptDataLoader:
        if self._train_prompts is None:
            raise RuntimeError("PromptDataModule.train_dataloader() was called before setup('fit').")
        num_replicas, rank = self._data_parallel()
        sampler = PromptSampler(
            len(self._train_prompts),
            prompts_per_step=self.prompts_per_step,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=self.shuffle,
            seed=self.seed,
        )
        self._train_loader = PromptDataLoader(self._train_prompts, sampler, in_step=self._in_step)
        if self._restored is not None:
            self._train_loader.load_state_dict(self._restored)
            self._restored = None
        _silence_worker_advice()
        return self._train_loader

    def draw(self, count: int) -> PromptBatch:
        """This rank's share of further training prompts for the step under way, see ``PromptDataLoader.draw``.

        Raises:
            RuntimeError: if no training step is under way.
        """
        if self._train_loader is None:
            raise RuntimeError("PromptDataModule.draw() adds prompts to a training step, and none is under way.")
        return self._train_loader.draw(count)

    @override
    def val_dataloader(self) -> DataLoader[EncodedPrompt] | list[DataLoader[EncodedPrompt]]:
        """The validation prompts in their order, every pass from the start; an empty list without ``val_source``."""
        if self._val_prompts is None:
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
            return []
        num_replicas, rank = self._data_parallel()
        sampler = PromptSampler(
            len(self._val_prompts),
            prompts_per_step=self._val_step(len(self._val_prompts)),
            num_replicas=num_replicas,
            rank=rank,
            shuffle=False,
        )
        _silence_worker_advice()
        return DataLoader(
            self._val_prompts,
            batch_size=sampler.prompts_per_rank,
            sampler=sampler,
            collate_fn=collate_prompts,
            generator=torch.Generator(),  # leaves the global one alone, as PromptDataLoader does
        )

    @override
    def test_dataloader(self) -> DataLoader[EncodedPrompt] | list[DataLoader[EncodedPrompt]]:
        """The validation prompts as well: ``Trainer.test`` is an evaluation run on ``val_source``."""
        return self.val_dataloader()

    @override
    def state_dict(self) -> dict[str, Any]:
        # Beside the loader's own state in Lightning's fit loop, which is not restored from a checkpoint that was
        # written between two epochs (lightning 2.6.6: FitLoop.restarting is False there).
        return {} if self._train_loader is None else {"train": self._train_loader.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # trainer.validate(ckpt_path=) comes here as well; a fit() after it starts from the beginning.
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._restored = state_dict.get("train")

    def _encode(self, source: PromptSource, name: str) -> PromptDataset:
        encoded, report = encode_prompts(
            self._resolve_tokenizer(),
            source.load(),
            max_prompt_tokens=self.max_prompt_tokens,
            overlong=self.overlong,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        self.length_reports[name] = report
        dataset = PromptDataset(encoded)
        if self.trainer is None or self.trainer.is_global_zero:
            _log_report(name, report, max_prompt_tokens=self.max_prompt_tokens)
        if not encoded:
            raise ValueError(
                f"All {report.total} {name} prompts are longer than max_prompt_tokens={self.max_prompt_tokens}; the "
                f"longest has {report.longest} tokens. Raise the limit."
            )
        self._compare_over_ranks(dataset, name)
        return dataset

    def _resolve_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            if self.trainer is None:
                raise RuntimeError(
                    "PromptDataModule has no tokenizer and no trainer to take one from: pass tokenizer=, or use it "
                    "through Trainer.fit(module, datamodule=...)."
                )
            found = getattr(self.trainer.lightning_module, "tokenizer", None)
            if found is None:
                raise RuntimeError(
                    f"{type(self.trainer.lightning_module).__name__} has no tokenizer: pass "
                    "PromptDataModule(tokenizer=...)."
                )
            return found
        if isinstance(self.tokenizer, str | Path):
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        return self.tokenizer

    def _data_parallel(self) -> tuple[int, int]:
        """Number of data-parallel ranks and this one's index; single-device strategies name none."""
        kwargs = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if kwargs is None else (kwargs["num_replicas"], kwargs["rank"])

    def _in_step(self) -> bool:
        """Whether the last batch is still being trained on, or was refused by on_train_batch_start."""
        if self.trainer is None:
            return False
        current: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(current.ready > min(current.started, current.processed))

    def _val_step(self, num_prompts: int) -> int:
        if self.val_prompts_per_step is not None:
            return self.val_prompts_per_step
        num_replicas, _ = self._data_parallel()
        return min(self.prompts_per_step, max(1, num_prompts // num_replicas) * num_replicas)

    def _check_val(self, prompts: PromptDataset) -> None:
        num_replicas, _ = self._data_parallel()
        step = self._val_step(len(prompts))
        check_batch_size(len(prompts), prompts_per_step=step, num_replicas=num_replicas)
        if left_out := len(prompts) % step:
            logger.warning(
                "Validation leaves out the last %d of %d prompts: they do not fill a step of %d. Choose "
                "val_prompts_per_step to divide %d.", left_out, len(prompts), step, len(prompts),
            )  # fmt: skip

    def _compare_over_ranks(self, dataset: PromptDataset, name: str) -> None:
        """All ranks must hold the same prompts in the same order. Collective."""
        if self.trainer is None or self.trainer.world_size == 1:
            return
        first = self.trainer.strategy.broadcast(dataset.fingerprint, src=0)
        if first != dataset.fingerprint:
            raise RuntimeError(
                f"The {name} prompts of rank {self.trainer.global_rank} differ from those of rank 0 (fingerprints "
                f"{dataset.fingerprint} and {first}): ranks would not share out one data set. Make the source the "
                "same everywhere: the same files on every node, a fixed seed."
            )

    def _refuse_what_the_trainer_would_break(self) -> None:
        trainer: Any = self.trainer  # lightning sets these attributes from its connectors, unseen by type checkers
        if trainer is None:
            return
        if trainer.reload_dataloaders_every_n_epochs:
            raise ValueError(
                "reload_dataloaders_every_n_epochs would start the prompts anew. Leave it at 0: PromptDataModule "
                "makes a new order each epoch itself."
            )
        if trainer.overfit_batches:
            raise ValueError(
                "overfit_batches replaces the sampler, and with it the share of each rank. Give the data module a "
                "source of few prompts instead, such as ListPrompts."
            )


def _log_report(name: str, report: LengthReport, *, max_prompt_tokens: int | None) -> None:
    logger.info("%s prompts: %d, the longest %d tokens", name, report.total, report.longest)
    for verb, uids in (("dropped", report.dropped), ("truncated", report.truncated)):
        if uids:
            logger.warning(
                "%s prompts: %s %d of %d, longer than max_prompt_tokens=%d (%s%s)",
                name, verb, len(uids), report.total, max_prompt_tokens,
                ", ".join(uids[:5]), ", ..." if len(uids) > 5 else "",
            )  # fmt: skip


def _silence_worker_advice() -> None:
    """The prompts are encoded and in memory: worker processes, which Lightning advises, would only cost."""
    warnings.filterwarnings("ignore", message=r"The '(train|val)_dataloader' does not have many workers")
