"""A process group beside the default one, for broadcasts between a sender and its receivers."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore


def listening_store(host: str, *, timeout: float) -> TCPStore:
    """A store for the members of a group to find each other, on this address alone: torch's own listens on all.

    Args:
        host: the address.
        timeout: of what its members wait for, in seconds.
    """
    listener = socket.create_server((host, 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def joined_store(host: str, port: int, *, timeout: float) -> TCPStore:
    """The same store, for those who have been told where it listens."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def make_group(store: Store, *, rank: int, size: int, device: torch.device, timeout: float) -> Any:
    """A process group beside the default one; all its members call this at the same time."""
    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    backend: Any = dist.ProcessGroupGloo
    gloo_options = backend._Options()
    local = isinstance(store, TCPStore) and store.host in ("127.0.0.1", "localhost")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo" if local else "")
    device_of_gloo = backend.create_device(interface=interface) if interface else backend.create_default_device()
    gloo_options._devices = [device_of_gloo]
    gloo_options._timeout = limit
    return backend(store, rank, size, gloo_options)


def end_group(group: Any) -> None:
    """Ends what a CUDA group still has on its way; a gloo group ends with its last reference."""
    if type(group).__name__ == "ProcessGroupNCCL":
        group.abort()
