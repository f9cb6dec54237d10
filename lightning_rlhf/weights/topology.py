"""Who sends to whom. Pure: ranks and names in, a topology out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from lightning_rlhf.contracts.checkpoint_engine import Route, Topology


def build_topology(
    *, trainer_world_size: int, receiver_ids: Iterable[str], senders: Literal["one", "all"] = "one"
) -> Topology:
    """Gives each receiver one sender.

    Every trainer rank sees every full tensor while it is gathered, so any of them can send it.

    Args:
        trainer_world_size: number of trainer ranks.
        receiver_ids: the receivers' names.
        senders: ``"one"``: rank 0 serves all, as a broadcast needs; ``"all"``: receivers are shared out evenly in
            their order, as pays where each has a link of its own.

    Raises:
        ValueError: without trainer ranks or receivers, or if a name comes twice.
    """
    receivers = tuple(receiver_ids)
    if trainer_world_size < 1 or not receivers:
        raise ValueError(f"A topology needs senders and receivers: {trainer_world_size} rank(s), {len(receivers)}.")
    if len(set(receivers)) != len(receivers):
        raise ValueError(f"Receivers need names of their own, got {list(receivers)}.")
    count = 1 if senders == "one" else min(trainer_world_size, len(receivers))
    routes = tuple(Route(sender_rank=rank, receiver_ids=receivers[rank::count]) for rank in range(count))
    return Topology(sender_ranks=tuple(range(count)), receiver_ids=receivers, routes=routes)
