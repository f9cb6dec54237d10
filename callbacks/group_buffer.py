"""Finished groups that wait to be trained on: a torchrl replay buffer over rows, each of which names a group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.types import RolloutSequence


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """All responses to one prompt.

    Attributes:
        prompt: as it was handed out: ``uid``, ``prompt_token_ids``, ``prompt``, ``metadata``.
        version: policy version at which the group was begun; its tokens are of this or later ones.
        sequences: the responses, by sample index.
    """

    prompt: dict[str, Any]
    version: int
    sequences: list[RolloutSequence]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"prompt": self.prompt, "version": self.version, "sequences": [asdict(s) for s in self.sequences]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> FinishedGroup:
        """From what `to_json` gave."""
        sequences = [RolloutSequence(**one) for one in values["sequences"]]
        return cls(prompt=values["prompt"], version=values["version"], sequences=sequences)


class GroupBuffer:
    """Gives groups out once, those that age out first, else in the order of their arrival.

    The rows of the torchrl buffer are ``(version, arrival)``; arrival -1 is an empty row. Its sampler chooses rows.

    Args:
        capacity: groups that fit in.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._groups: list[FinishedGroup | None] = [None] * capacity
        self._arrivals = 0
        self._sampler, self._rows = _make_rows(capacity)

    def __len__(self) -> int:
        """Groups that wait."""
        return sum(group is not None for group in self._groups)

    def put(self, group: FinishedGroup) -> None:
        """Takes a group in.

        Raises:
            RuntimeError: if the buffer is full.
        """
        if None not in self._groups:
            raise RuntimeError(f"The buffer of finished groups is full: {self.capacity} wait to be trained on.")
        row = self._groups.index(None)
        self._groups[row] = group
        self._write(row, version=group.version, arrival=self._arrivals)
        self._arrivals += 1

    def count_older(self, version: int) -> int:
        """Groups that were begun before ``version``."""
        return sum(group is not None and group.version < version for group in self._groups)

    def take(self, count: int, *, older_first: int) -> list[FinishedGroup]:
        """Removes and returns up to ``count`` groups; first those begun before version ``older_first``."""
        self._sampler.older_first = older_first
        available = min(count, len(self))
        if available == 0:
            return []
        taken = []
        for row in self._rows.sample(available)["row"].tolist():
            group = self._groups[row]
            assert group is not None  # the sampler passes empty rows over
            self._groups[row] = None
            self._write(row, version=-1, arrival=-1)
            taken.append(group)
        return taken

    def _write(self, row: int, *, version: int, arrival: int) -> None:
        from tensordict import TensorDict

        values = {"row": row, "version": version, "arrival": arrival}
        self._rows.storage.set(row, TensorDict({name: torch.tensor(v) for name, v in values.items()}, batch_size=[]))

    def in_order(self) -> list[FinishedGroup]:
        """What waits, by arrival."""
        rows = self._rows.storage[: self.capacity]
        order = torch.argsort(rows["arrival"]).tolist()
        return [group for row in order if (group := self._groups[row]) is not None]


def _make_rows(capacity: int) -> tuple[Any, Any]:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.data.replay_buffers.samplers import Sampler

    logging.getLogger("torchrl").setLevel(logging.WARNING)  # it tells of each storage that it makes

    class OldestFirst(Sampler):  # type: ignore[misc]
        """Rows of groups begun before ``older_first``, then the others; each by arrival."""

        older_first = 0

        def sample(self, storage: Any, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
            rows = storage[:capacity]
            filled = torch.nonzero(rows["arrival"] >= 0).flatten()
            young = (rows["version"][filled] >= self.older_first).long()
            key = young * (int(rows["arrival"].max()) + 1) + rows["arrival"][filled]
            return filled[torch.argsort(key)][:batch_size], {}

        def _empty(self) -> None:
            """Nothing is held."""

        def dumps(self, path: Any) -> None:
            """Nothing is held."""

        def loads(self, path: Any) -> None:
            """Nothing is held."""

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Nothing is held."""

    sampler = OldestFirst()
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)
    empty = torch.full((capacity,), -1)
    buffer.extend(
        TensorDict({"row": torch.arange(capacity), "version": empty, "arrival": empty.clone()}, batch_size=[capacity])
    )
    return sampler, buffer


def restore(capacity: int, groups: Sequence[dict[str, Any]]) -> GroupBuffer:
    """A buffer with groups of a checkpoint, in the order of their arrival."""
    buffer = GroupBuffer(max(capacity, len(groups)))
    for values in groups:
        buffer.put(FinishedGroup.from_json(values))
    return buffer
