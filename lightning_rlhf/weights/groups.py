"""What a consumer must get together: the parts of fused layers, and the names of tied tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_rlhf.weights.receipt import sample_elements

FUSED_GROUPS: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that rollout engines keep as one matrix: part of it alone loads wrongly, and silently."""


class FusedGroups:
    """Holds the members of a fused layer back until the last one is there, and gives them out back to back.

    Args:
        groups: the last components of the modules' names that belong together, under one parent.
        lasting: names of tensors whose memory is nobody's buffer: they need not be copied to last.
    """

    def __init__(
        self, groups: Sequence[Sequence[str]] = FUSED_GROUPS, *, lasting: Collection[str] = frozenset()
    ) -> None:
        self._lasting = lasting
        self._members = {member: tuple(group) for group in groups for member in group}
        self._held: dict[tuple[str, ...], dict[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Takes one tensor in; returns those that may be used now, in the group's order."""
        key = self._key(name)
        if key is None:
            return [(name, tensor)]
        held = self._held.setdefault(key, {})
        held[name] = tensor
        if len(held) < len(key):
            return []
        del self._held[key]
        return [(member, held[member]) for member in key]

    def _key(self, name: str) -> tuple[str, ...] | None:
        """The names of the whole group that this tensor belongs to."""
        parts = name.split(".")
        if len(parts) < 2 or parts[-2] not in self._members:
            return None
        return tuple(".".join([*parts[:-2], member, parts[-1]]) for member in self._members[parts[-2]])

    def holds_borrowed(self) -> bool:
        """Whether what is held back lies in a buffer."""
        return any(name not in self._lasting for held in self._held.values() for name in held)

    def secure(self) -> None:
        """Copies what is held back: the buffer that it lies in is about to be written again."""
        for held in self._held.values():
            for name, tensor in held.items():
                if name not in self._lasting:
                    held[name] = tensor.clone()

    def finish(self) -> None:
        """Checks that no group is left incomplete.

        Raises:
            ValueError: naming what came and what is missing.
        """
        for key, held in self._held.items():
            missing = [name for name in key if name not in held]
            raise ValueError(
                f"Weight push: {sorted(held)} came without {missing}. Rollout engines keep these as one matrix, and "
                f"part of it loads wrongly: send the whole group, or set fused_groups to what this model fuses."
            )


def without_tied(named_tensors: Iterable[tuple[str, Tensor]], tied: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Leaves out the second names of tied tensors; the receiver gives them out with the first.

    Args:
        named_tensors: the stream; it may bring the second names or not.
        tied: the first name, by second name (``{"lm_head.weight": "model.embed_tokens.weight"}``).

    Raises:
        ValueError: if the two differ, or the first name never came.
    """
    firsts = {first: torch.empty(0) for first in tied.values()}
    seconds: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if name in tied:
            seconds[name] = sample_elements(tensor)
            continue
        if name in firsts:
            firsts[name] = sample_elements(tensor)
        yield name, tensor
    for second, sample in seconds.items():
        if not torch.equal(sample, firsts[tied[second]]):
            raise ValueError(f"Weight push: {second} is declared as tied to {tied[second]}, but they differ.")


def with_tied(named_tensors: Iterable[tuple[str, Tensor]], tied: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Gives tied tensors out under each of their names, one after the other."""
    for name, tensor in named_tensors:
        yield name, tensor
        for second, first in tied.items():
            if first == name:
                yield second, tensor


def into_destination(name: str, tensor: Tensor, destinations: Mapping[str, Tensor]) -> Tensor:
    """The tensor's destination, which holds it then, in its own dtype; the tensor itself if it has none.

    Raises:
        ValueError: if the shapes differ.
    """
    destination = destinations.get(name)
    if destination is None or destination is tensor:
        return tensor
    if destination.shape != tensor.shape:
        raise ValueError(
            f"Weight push: {name} is {tensor.dtype} {list(tensor.shape)}, but its destination is {destination.dtype} "
            f"{list(destination.shape)}: give none for tensors that are not taken as they are."
        )
    destination.detach().copy_(tensor)
    return destination
