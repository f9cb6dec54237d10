"""Which prompts make which step, and which rank sees which of them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the data stands, in global prompts: it means the same on any number of ranks.

    Attributes:
        epoch: passes over the prompts that are done.
        prompts_in_epoch: prompts of the current pass that all ranks together have consumed.
        prompts_consumed: prompts consumed since the start, over all passes.
    """

    epoch: int = 0
    prompts_in_epoch: int = 0
    prompts_consumed: int = 0


class PromptSampler(DistributedSampler[Any]):
    """Splits each step's prompts over the data-parallel ranks; Lightning leaves a DistributedSampler alone.

    Step ``s`` of epoch ``e`` is the ``s``-th slice of ``prompts_per_step`` prompts of the epoch's order, whatever the
    number of ranks; rank ``r`` takes the ``r``-th contiguous part of the slice. No prompt is repeated to fill up. The
    last incomplete slice of an epoch is left out; a new order each epoch sees to it that these are not always the same.
    The epoch follows from ``start``, not from ``set_epoch``: there is one position, the one that checkpoints hold.

    Args:
        num_prompts: prompts of the data set.
        prompts_per_step: prompts of one step over all ranks.
        num_replicas: data-parallel ranks.
        rank: this one.
        shuffle: a new order each epoch, from ``seed`` and the epoch; else the given order.
        seed: of the order.

    Raises:
        ValueError: if the numbers do not fit, with the numbers.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        prompts_per_step: int,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        check_batch_size(num_prompts, prompts_per_step=prompts_per_step, num_replicas=num_replicas)
        super().__init__(
            range(num_prompts),  # type: ignore[arg-type]  # only its length is read
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=True,
        )
        self.num_prompts = num_prompts
        self.prompts_per_step = prompts_per_step
        self.prompts_per_rank = prompts_per_step // num_replicas
        self.steps_per_epoch = num_prompts // prompts_per_step
        self.start = Position()
        self._last_order: tuple[int, list[int]] | None = None

    def order(self, epoch: int) -> list[int]:
        """The order of all prompts in an epoch, the same on every rank."""
        if self._last_order is None or self._last_order[0] != epoch:
            order = list(range(self.num_prompts))
            if self.shuffle:
                # A seed sequence, not seed + epoch: run (seed 1, epoch 0) must not repeat run (seed 0, epoch 1).
                order = np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts).tolist()
            self._last_order = (epoch, order)
        return self._last_order[1]

    def normalised(self, position: Position) -> Position:
        """The position of the next whole step: past the epoch's last whole step comes the next epoch."""
        if position.prompts_in_epoch + self.prompts_per_step <= self.num_prompts:
            return position
        return Position(epoch=position.epoch + 1, prompts_consumed=position.prompts_consumed)

    def after_step(self, position: Position) -> Position:
        """The position after the step that starts at ``position``."""
        start = self.normalised(position)
        return Position(
            epoch=start.epoch,
            prompts_in_epoch=start.prompts_in_epoch + self.prompts_per_step,
            prompts_consumed=start.prompts_consumed + self.prompts_per_step,
        )

    def share(self, indices: Sequence[int]) -> list[int]:
        """This rank's contiguous part of prompts that all ranks drew; the parts differ by one prompt at most."""
        first, last = (len(indices) * rank // self.num_replicas for rank in (self.rank, self.rank + 1))
        return list(indices[first:last])

    def step(self, position: Position) -> list[int]:
        """All ranks' prompts of the step that starts at ``position``."""
        start = self.normalised(position)
        return self.order(start.epoch)[start.prompts_in_epoch :][: self.prompts_per_step]

    def draw(self, position: Position, count: int, *, without: Container[int]) -> tuple[list[int], Position]:
        """Further prompts for a step that lacks some, from ``position`` on: what is left of the epoch, then the next.

        Args:
            position: where the data stands.
            count: prompts wanted over all ranks.
            without: indices that are passed over, and count as consumed: a prompt comes once in a step, also where
                the next epoch's order begins with it.

        Returns:
            The prompts of all ranks, fewer than ``count`` if an epoch later there are no others; and the position
            after them.
        """
        drawn: list[int] = []
        passed = 0
        while len(drawn) < count and passed < self.num_prompts:
            if position.prompts_in_epoch == self.num_prompts:
                position = Position(epoch=position.epoch + 1, prompts_consumed=position.prompts_consumed)
            order = self.order(position.epoch)
            first = at = position.prompts_in_epoch
            while at < self.num_prompts and len(drawn) < count and passed < self.num_prompts:
                if order[at] not in without and order[at] not in drawn:
                    drawn.append(order[at])
                at, passed = at + 1, passed + 1
            position = Position(
                epoch=position.epoch, prompts_in_epoch=at, prompts_consumed=position.prompts_consumed + at - first
            )
        return drawn, position

    def __iter__(self) -> Iterator[int]:
        """This rank's prompts of the next ``steps_per_epoch`` steps from ``start``, into the next epoch if need be."""
        position = self.start
        for _ in range(self.steps_per_epoch):
            yield from self.share(self.step(position))
            position = self.after_step(position)

    def __len__(self) -> int:
        """This rank's prompts of one epoch."""
        return self.steps_per_epoch * self.prompts_per_rank

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: Lightning counts its own epochs, which ``limit_train_batches`` may cut short."""


def check_batch_size(num_prompts: int, *, prompts_per_step: int, num_replicas: int) -> None:
    """Refuses a step that the prompts cannot fill or the ranks cannot share.

    Raises:
        ValueError: with the numbers.
    """
    if prompts_per_step < 1:
        raise ValueError(f"prompts_per_step must be at least 1, got {prompts_per_step}.")
    if prompts_per_step % num_replicas:
        raise ValueError(
            f"prompts_per_step={prompts_per_step} cannot be shared equally by {num_replicas} data-parallel ranks. "
            f"Choose a multiple of {num_replicas}, such as {-(-prompts_per_step // num_replicas) * num_replicas}."
        )
    if num_prompts < prompts_per_step:
        raise ValueError(
            f"prompts_per_step={prompts_per_step}, but there are only {num_prompts} prompts: no step can be filled "
            "without repeating one. Give more prompts or a smaller step."
        )
