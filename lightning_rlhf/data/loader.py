"""The loader that Lightning iterates: batches of prompts with a position that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_rlhf.data.encode import EncodedPrompt
from lightning_rlhf.data.prompts import fingerprint
from lightning_rlhf.data.sampler import Position, PromptSampler
from lightning_rlhf.types import PromptBatch


class PromptDataset(Dataset[EncodedPrompt]):
    """Encoded prompts by index."""

    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        self.prompts = list(prompts)
        self.fingerprint = fingerprint(encoded.prompt for encoded in self.prompts)

    def __getitem__(self, index: int) -> EncodedPrompt:
        return self.prompts[index]

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.prompts)


def collate_prompts(prompts: Sequence[EncodedPrompt]) -> PromptBatch:
    """One rank's share of a step. The metadata are copied (shallowly), so that a reward cannot write into the data."""
    return PromptBatch(
        uids=[encoded.prompt.uid for encoded in prompts],
        prompt_token_ids=[list(encoded.token_ids) for encoded in prompts],
        prompts=[encoded.prompt.text for encoded in prompts],
        metadata=[dict(encoded.prompt.metadata) for encoded in prompts],
    )


class PromptDataLoader(DataLoader[EncodedPrompt]):
    """Batches of prompts; each pass goes on where the last one stopped.

    A pass is ``len(self)`` steps, one epoch's worth. If the position lies within an epoch (after a resume, or where
    Lightning's epochs are cut short by ``limit_train_batches``), the pass reaches into the next epoch: no prompt is
    left out because a pass ended.

    ``state_dict`` counts a step's prompts as consumed once the step is done, so that a checkpoint written in the midst
    of a step makes the resumed run repeat it.

    A step that lacks prompts, because dynamic sampling left some out, takes more by ``draw``; the next step goes on
    behind them.

    Args:
        dataset: the encoded prompts.
        sampler: this rank's share of each step.
        in_step: tells whether the last batch handed out is still being trained on; None: never when state is saved.
    """

    sampler: PromptSampler

    def __init__(
        self, dataset: PromptDataset, sampler: PromptSampler, *, in_step: Callable[[], bool] | None = None
    ) -> None:
        super().__init__(
            dataset,
            batch_size=sampler.prompts_per_rank,
            sampler=sampler,
            drop_last=True,
            collate_fn=collate_prompts,
            # Batches are made in __iter__ below, from a position that moves between them. Whoever iterates the base
            # class all the same must not draw from the global generator: a resumed run would see other numbers.
            generator=torch.Generator(),
        )
        self.in_step = in_step
        self._prompts = dataset
        self._fingerprint = dataset.fingerprint
        self._in_this_step: set[int] = set()
        self._position = Position()
        self._position_before_step = Position()

    def __iter__(self) -> Iterator[PromptBatch]:  # type: ignore[override]
        """One pass from the current position."""
        # A generator: the position is read at each batch, by when Lightning has restored it and draw() has moved it.
        for _ in range(len(self)):
            self._position_before_step = self._position
            indices = self.sampler.step(self._position)
            self._position = self.sampler.after_step(self._position)
            self._in_this_step = set(indices)
            yield self._batch(self.sampler.share(indices))

    def draw(self, count: int) -> PromptBatch:
        """This rank's share of further prompts for the step whose batch came last; they count as consumed with it.

        Args:
            count: prompts wanted over all ranks, the same on each.

        Returns:
            The share, which may be empty; over all ranks fewer than ``count`` once every prompt was in the step.
        """
        drawn, self._position = self.sampler.draw(self._position, count, without=self._in_this_step)
        self._in_this_step.update(drawn)
        return self._batch(self.sampler.share(drawn))

    def _batch(self, indices: Sequence[int]) -> PromptBatch:
        return collate_prompts([self._prompts[index] for index in indices])

    @property
    def position(self) -> Position:
        """Prompts of the steps that are done."""
        if self.in_step is not None and self.in_step():
            return self._position_before_step
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """The position in global prompts, with what it was counted in."""
        position = self.position
        return {
            "prompts_consumed": position.prompts_consumed,
            "epoch": position.epoch,
            "prompts_in_epoch": position.prompts_in_epoch,
            **self._counted_in(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a saved position; the number of ranks and ``prompts_per_step`` may differ from the saved run's.

        Raises:
            ValueError: if the position was counted in other prompts or another order.
        """
        for name, now in self._counted_in().items():
            if state_dict[name] != now:
                raise ValueError(
                    f"The checkpoint's data position was counted with {name}={state_dict[name]!r}, but now {name} is "
                    f"{now!r}: going on from it would repeat some prompts and lose others. Restore the prompts and "
                    "the data module's arguments, or start a new run from the checkpoint's weights alone."
                )
        self._position = self._position_before_step = Position(
            epoch=state_dict["epoch"],
            prompts_in_epoch=state_dict["prompts_in_epoch"],
            prompts_consumed=state_dict["prompts_consumed"],
        )

    def _counted_in(self) -> dict[str, Any]:
        sampler = self.sampler
        return {
            "num_prompts": sampler.num_prompts,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
            "fingerprint": self._fingerprint,
        }
