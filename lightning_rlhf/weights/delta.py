"""The checkpoint engine that sends only the elements that changed, over the link of any other engine.

Both sides keep a copy of what was sent last. A tensor travels as the places and new values of its changed elements, or
whole where that is smaller, with a checksum of what must come out. Elements are compared bit by bit. Whole
tensors go to everybody at every ``dense_every``-th sync, when a receiver is new, and after a failure.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    Invitation,
    Topology,
)
from lightning_rlhf.weights.bucket_header import BucketError
from lightning_rlhf.weights.checksum import as_bytes, checksum_of
from lightning_rlhf.weights.connected import ConnectedCheckpointEngine
from lightning_rlhf.weights.transform import NamedTensors, StreamTransform

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_INT32_PLACES = 2**31
_WORD_BYTES = 8
_SAMPLED_EVERY = 61
MANY_WORDS = 0.12
"""If more of a sample differ, to look into each word costs more than to compare all elements."""
EXACT = (".gate.weight", "router")
"""Routers of experts choose by small differences: engines keep theirs in the trainer's dtype."""


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, flat; a NaN equals itself then."""
    return as_bytes(tensor).view(_BITS[tensor.element_size()])


def changed_places(new: Tensor, held: Tensor) -> Tensor:
    """Where two flat tensors of integers differ, ``int64``, ascending.

    They are compared eight bytes at a time first, which leaves a few words to look into if few elements differ.
    """
    per_word = _WORD_BYTES // new.element_size()
    whole = new.numel() // per_word * per_word
    if per_word == 1 or new.storage_offset() % per_word or held.storage_offset() % per_word:
        return (new != held).nonzero().reshape(-1)
    new_words, held_words = new[:whole].view(torch.int64), held[:whole].view(torch.int64)
    sample = new_words[::_SAMPLED_EVERY] != held_words[::_SAMPLED_EVERY]
    if int(sample.sum()) > MANY_WORDS * len(sample):
        return (new != held).nonzero().reshape(-1)
    words = (new_words != held_words).nonzero().reshape(-1)
    inside = (new_words[words].view(new.dtype) != held_words[words].view(new.dtype)).nonzero().reshape(-1)
    places = words[inside.div(per_word, rounding_mode="floor")] * per_word + inside % per_word
    return torch.cat([places, (new[whole:] != held[whole:]).nonzero().reshape(-1) + whole])


class DeltaTransform(StreamTransform):
    """Differences to the sync before.

    Each tensor becomes, in this order, ``dense:<name>``, or ``at:<name>`` and ``to:<name>``, or neither if nothing
    changed; then ``sum:<name>``, eight bytes. The stream begins with an empty ``base:<state>``.

    Args:
        dense_every: how often everything travels whole.
        dtype: that matrices are rounded to before they are compared; None keeps what the trainer has.
        exact: parts of the names of matrices that keep their dtype all the same.

    Attributes:
        payload_share: bytes of the last stream over those of its tensors.
    """

    def __init__(self, *, dense_every: int, dtype: torch.dtype | None = None, exact: Sequence[str] = EXACT) -> None:
        if dense_every < 1:
            raise ValueError(f"dense_every={dense_every}: expected at least 1 (1 sends every sync whole).")
        self.dense_every = dense_every
        self.dtype = dtype
        self.exact = tuple(exact)
        self.payload_share = 1.0
        self._session = secrets.token_hex(8)
        self._syncs = 0
        self._held: dict[str, Tensor] = {}
        self._next_base: str | None = None

    def _state(self) -> str:
        return f"{self._session}-{self._syncs}"

    @override
    def encode(self, stream: NamedTensors, *, bases: Sequence[str | None]) -> NamedTensors:
        dense = self._syncs % self.dense_every == 0 or any(base != self._state() for base in bases)
        if dense:
            self._held = {}
        payload = whole = 0
        yield f"base:{self._session}-{self._syncs + 1}", torch.empty(0)
        for name, tensor in stream:
            new = self._rounded(name, tensor.detach()).to("cpu")
            whole += new.nbytes
            for part, content in self._parts(name, new):
                payload += content.nbytes
                yield f"{part}:{name}", content
        self.payload_share = payload / max(1, whole)

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        wider = self.dtype is not None and tensor.is_floating_point() and tensor.itemsize > self.dtype.itemsize
        return tensor.to(self.dtype) if wider and tensor.ndim > 1 and not any(e in name for e in self.exact) else tensor

    def _parts(self, name: str, new: Tensor) -> Iterator[tuple[str, Tensor]]:
        held = self._held.get(name)
        if held is None or held.shape != new.shape or held.dtype != new.dtype:
            self._held[name] = new.clone(memory_format=torch.contiguous_format)
            yield "dense", new
        else:
            words = 2 if new.element_size() == 16 else 1
            new_bits, held_bits = _bits(new), _bits(held)
            places = changed_places(new_bits, held_bits)
            values = new_bits[places]
            held_bits[places] = values
            places = places.to(torch.int32 if new.numel() * words < _INT32_PLACES else torch.int64)
            if places.nbytes + values.nbytes >= new.nbytes:
                yield "dense", new
            elif len(places):
                yield "at", places
                yield "to", values
        yield "sum", torch.tensor(list(bytes.fromhex(checksum_of(new))), dtype=torch.uint8)

    @override
    def sent(self) -> None:
        self._syncs += 1

    @override
    def decode(self, stream: NamedTensors) -> NamedTensors:
        places: Tensor | None = None
        for label, content in stream:
            part, _, name = label.partition(":")
            if part == "base":
                self._next_base = name
            elif part == "dense":
                self._keep(name, content)
            elif part == "at":
                # its buffer, perhaps on a GPU, may be written again before `to`
                places = content.to("cpu", torch.int64, copy=True)
            elif part == "to" and places is not None:
                _bits(self._known(name))[places] = content.cpu()
                places = None
            elif part == "sum":
                yield name, self._checked(name, bytes(content.tolist()).hex())
            else:
                raise BucketError(f"{label!r} is no part of a delta stream.")

    def _keep(self, name: str, content: Tensor) -> None:
        held = self._held.get(name)
        if held is not None and held.shape == content.shape and held.dtype == content.dtype:
            held.copy_(content)
        else:
            self._held[name] = content.cpu().clone()

    def _known(self, name: str) -> Tensor:
        if name not in self._held:
            raise BucketError(f"{name}: changes arrived, but this receiver never had the tensor.")
        return self._held[name]

    def _checked(self, name: str, expected: str) -> Tensor:
        tensor = self._known(name)
        found = checksum_of(tensor)
        if found != expected:
            raise BucketError(
                f"{name}: checksum {found} after the changes were put in, but the sender has {expected}. "
                f"The next sync sends everything."
            )
        return tensor

    @override
    def received(self) -> None:
        self.base = self._next_base

    @override
    def forget(self) -> None:
        self._held = {}
        self._syncs = 0
        self._session = secrets.token_hex(8)
        self.base = self._next_base = None


@CheckpointEngineRegistry.register("delta")
class DeltaCheckpointEngine(CheckpointEngine):
    """Changed elements over another engine's link. Both sides hold one more copy of the model in host memory.

    Args:
        link: the engine that carries them, by name.
        dense_every: how often everything travels whole.
        dtype: ``"bfloat16"`` for rollout engines that compute in it, while the trainer has its weights in fp32:
            matrices are rounded before they are compared. A small step moves every fp32 element, and few of the
            rounded ones. Vectors, and matrices with a part of their name in ``exact``, keep their dtype.
        exact: see there.
        **kwargs: that engine's.
    """

    remote = True

    def __init__(
        self,
        *,
        link: str = "shm",
        dense_every: int = 20,
        dtype: str | None = None,
        exact: Sequence[str] = EXACT,
        **kwargs: Any,
    ) -> None:
        if dtype not in (None, "bfloat16", "float16"):
            raise ValueError(f"dtype={dtype!r}: expected 'bfloat16', 'float16' or None.")
        inner = CheckpointEngineRegistry.new(link, **kwargs)
        if not isinstance(inner, ConnectedCheckpointEngine):
            raise ValueError(f"link={link!r} connects no processes; delta goes over shm, nccl, nixl, mooncake or disk.")
        self.link = link
        self.transform = inner.transform = DeltaTransform(
            dense_every=dense_every, dtype=None if dtype is None else getattr(torch, dtype), exact=exact
        )
        self.inner = inner

    @property
    def payload_share(self) -> float:
        """Bytes of the last sync over those of its tensors."""
        return self.transform.payload_share

    @override
    def prepare(self) -> None:
        self.inner.prepare()

    @override
    def build_topology(self, *, trainer_world_size: int, receiver_ids: Iterable[str]) -> Topology:
        return self.inner.build_topology(trainer_world_size=trainer_world_size, receiver_ids=receiver_ids)

    @override
    def init_process_group(self, topology: Topology) -> None:
        self.inner.init_process_group(topology)

    @override
    def send_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.inner.send_weights(named_tensors)

    @override
    def receive_weights(self, destinations: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        return self.inner.receive_weights(destinations)

    @override
    def finalize(self) -> None:
        self.inner.finalize()

    @override
    def invitation(self, receiver_id: str) -> Invitation:
        inner = self.inner.invitation(receiver_id)
        own = {"link": self.link, "dense_every": self.transform.dense_every}
        return replace(inner, engine="delta", settings={**inner.settings, **own})

    @override
    def join(self, invitation: Invitation) -> None:
        self.inner.join(replace(invitation, engine=self.link))

    @override
    def close(self) -> None:
        self.inner.close()
