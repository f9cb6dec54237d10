"""The control channel between a sender and its receivers: small JSON messages over one TCP connection each.

Every wait ends: with a message, with the news that the peer is gone, or when time is up. Each of the last two is a
`PeerError` that names the peer and the phase. Whoever joins shows a token first.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

PROTOCOL = 1
LONGEST_MESSAGE = 64 << 20
HANDSHAKE_SECONDS = 5.0

Message = dict[str, Any]


class PeerError(RuntimeError):
    """A peer is gone, silent, or failed.

    Args:
        reason: what was seen of it, for the message.
        peer: who.
        phase: in which phase of the sync it was needed.

    Attributes:
        peer: who.
        phase: in which phase of the sync it was needed.
    """

    def __init__(self, reason: str, *, peer: str, phase: str) -> None:
        super().__init__(f"Weight sync, phase {phase!r}, peer {peer!r}: {reason}")
        self.peer = peer
        self.phase = phase


class Channel:
    """One end of a connection.

    Args:
        connection: connected socket.
        peer: who is at the other end, for messages.
    """

    def __init__(self, connection: socket.socket, *, peer: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._socket = connection
        self._read = bytearray()

    def fileno(self) -> int:
        """The socket's number."""
        return self._socket.fileno()

    def send(self, message: Message, *, phase: str, timeout: float) -> None:
        """Sends one message."""
        body = json.dumps(message).encode()
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(len(body).to_bytes(4, "big") + body)
        except TimeoutError as error:
            raise PeerError(f"took no message within {timeout:g} s.", peer=self.peer, phase=phase) from error
        except OSError as error:
            raise PeerError(self._last_words() or f"is gone ({error}).", peer=self.peer, phase=phase) from error

    def _last_words(self) -> str:
        """What the peer said before it closed, if that was the reason."""
        with suppress(PeerError, OSError):
            while True:
                message = self.receive(phase="", timeout=0.05)
                if message.get("type") in ("failed", "abort"):
                    return str(message.get("reason"))
        return ""

    def holds_message(self) -> bool:
        """Whether `receive` would return at once."""
        with suppress(OSError):  # it is gone: receive says so
            while self._next_length() is None and wait([self._socket], timeout=0):
                if not self._read_some(0.0):
                    break
        return self._next_length() is not None

    def receive(self, *, phase: str, timeout: float) -> Message:
        """The next message."""
        end = time.monotonic() + timeout
        while (length := self._next_length()) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise PeerError(f"no answer within {timeout:g} s.", peer=self.peer, phase=phase)
            try:
                alive = self._read_some(left)
            except TimeoutError:
                continue
            except OSError as error:
                raise PeerError(f"is gone ({error}).", peer=self.peer, phase=phase) from error
            if not alive:
                raise PeerError("is gone: it closed the connection or died.", peer=self.peer, phase=phase)
        body = bytes(self._read[4 : 4 + length])
        del self._read[: 4 + length]
        message = json.loads(body)
        if not isinstance(message, dict):
            raise PeerError(f"sent {type(message).__name__} instead of an object.", peer=self.peer, phase=phase)
        return message

    def _next_length(self) -> int | None:
        if len(self._read) < 4:
            return None
        length = int.from_bytes(self._read[:4], "big")
        if length > LONGEST_MESSAGE:
            raise PeerError(f"announced a message of {length} bytes.", peer=self.peer, phase="read")
        return length if len(self._read) >= 4 + length else None

    def _read_some(self, timeout: float) -> bool:
        self._socket.settimeout(timeout)
        with suppress(BlockingIOError):
            data = self._socket.recv(1 << 16)
            self._read += data
            return bool(data)
        return True

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


class Hub:
    """The sender's end: listens, lets receivers with the token in, and keeps their channels.

    Args:
        host: address to listen on; anything but loopback opens the port to the network.
    """

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self.token = secrets.token_hex(16)
        self.channels: dict[str, Channel] = {}
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def admit(self, wanted: Sequence[str], *, phase: str, timeout: float) -> None:
        """Waits until all of ``wanted`` have joined.

        Raises:
            PeerError: naming those that have not when time is up.
        """
        end = time.monotonic() + timeout
        while True:
            for name in [name for name, channel in self.channels.items() if readable([channel], timeout=0)]:
                # between two syncs receivers have nothing to say: this one has closed its end
                if not self.channels[name].holds_message():
                    self.dismiss(name)
            missing = [name for name in wanted if name not in self.channels]
            if not missing and not wait([self._listener], timeout=0):
                return
            left = end - time.monotonic()
            if missing and left <= 0:
                raise PeerError(f"has not joined within {timeout:g} s.", peer=", ".join(missing), phase=phase)
            if wait([self._listener], timeout=max(0.0, left)):
                self._accept()

    def _accept(self) -> None:
        connection, address = self._listener.accept()
        channel = Channel(connection, peer=f"{address[0]}:{address[1]}")
        try:
            hello = channel.receive(phase="join", timeout=HANDSHAKE_SECONDS)
            known = hmac.compare_digest(str(hello.get("token")), self.token) and hello.get("protocol") == PROTOCOL
            answer: Message = {"type": "welcome"} if known else {"type": "refused", "reason": "wrong token or protocol"}
            channel.send(answer, phase="join", timeout=HANDSHAKE_SECONDS)
        except (PeerError, ValueError):  # a stranger; those that are missed are named by admit
            channel.close()
            return
        if not known:
            channel.close()
            return
        channel.peer = str(hello.get("receiver_id"))
        self.dismiss(channel.peer)
        self.channels[channel.peer] = channel

    def dismiss(self, receiver_id: str) -> None:
        """Lets a receiver go, if it is there."""
        channel = self.channels.pop(receiver_id, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Lets all go and stops listening."""
        for name in list(self.channels):
            self.dismiss(name)
        self._listener.close()


def join_hub(address: str, *, token: str, receiver_id: str, timeout: float) -> Channel:
    """Joins a sender as ``receiver_id``.

    Raises:
        PeerError: if nobody answers there, or the token is not accepted.
    """
    host, _, port = address.rpartition(":")
    try:
        channel = Channel(socket.create_connection((host, int(port)), timeout=timeout), peer=f"sender at {address}")
    except OSError as error:
        raise PeerError(f"cannot be reached ({error}).", peer=f"sender at {address}", phase="join") from error
    hello = {"type": "hello", "token": token, "protocol": PROTOCOL, "receiver_id": receiver_id}
    channel.send(hello, phase="join", timeout=timeout)
    answer = channel.receive(phase="join", timeout=timeout)
    if answer.get("type") != "welcome":
        channel.close()
        raise PeerError(f"refused: {answer.get('reason')}.", peer=channel.peer, phase="join")
    return channel


def readable(channels: Sequence[Channel], *, timeout: float) -> list[Channel]:
    """Those of the channels whose peer has sent something, or has gone."""
    by_number = {channel.fileno(): channel for channel in channels}
    ready = wait(list(by_number), timeout=timeout)
    return [channel for number, channel in by_number.items() if number in ready]


def first_message(channels: Iterable[Channel], *, phase: str, timeout: float) -> tuple[Channel, Message]:
    """The next message of any of the channels.

    Raises:
        PeerError: if one of them is gone or reports a failure, or none has a message in time.
    """
    waiting = list(channels)
    for channel in waiting:
        if channel.holds_message():
            return channel, channel.receive(phase=phase, timeout=timeout)
    ready = readable(waiting, timeout=timeout)
    if not ready:
        names = ", ".join(channel.peer for channel in waiting)
        raise PeerError(f"no answer within {timeout:g} s.", peer=names, phase=phase)
    return ready[0], ready[0].receive(phase=phase, timeout=timeout)
