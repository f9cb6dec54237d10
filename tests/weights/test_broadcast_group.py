"""How the members of a broadcast's group find each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from lightning_rlhf.weights.broadcast_group import listening_store
from lightning_rlhf.weights.nccl import BroadcastSenderLink


def addresses_of(port: int) -> list[str]:
    """Local addresses, as the kernel writes them, on which this port is listened to."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                found.append(address)
    return found


@pytest.mark.parametrize("who", ["store", "nccl"])
def test_the_store_listens_on_loopback_alone(who: str) -> None:
    if who == "store":
        port = (store := listening_store("127.0.0.1", timeout=5.0)).port
    else:
        link = BroadcastSenderLink(["one"], 1 << 12, torch.device("cpu"), host="127.0.0.1", timeout=5.0)
        port, store = link.offer("one")["port"], link._store
    assert addresses_of(port) == ["0100007F"]
    everywhere = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # what torch does by itself
    assert addresses_of(everywhere.port) not in (["0100007F"], [])
    assert store.port == port
