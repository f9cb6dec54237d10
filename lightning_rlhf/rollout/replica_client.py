"""A replica seen from the trainer: one asynchronous method for each route of its server, each bounded in time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
from torch import Tensor

from lightning_rlhf.rollout.replica_engine import ReplicaStatus

NO_REPLICA = (
    "is no replica of this version: replicas are started by `python -m lightning_rlhf.rollout.serve`, and named by "
    "their root, http://host:port."
)


class ReplicaLostError(RuntimeError):
    """The replica is gone, hangs, or has no valid weights: what it was asked for can be asked of another."""


class ReplicaUnreadyError(ReplicaLostError):
    """The replica is well, but has no valid weights just now, and took nothing."""


class ReplicaRefusedError(ReplicaLostError):
    """What answers is not a replica of this run: it knows another token, or is some other server."""


class ReplicaClient:
    """Speaks to one replica; used in one event loop.

    Args:
        url: ``http://host:port``.
        token: the replica's.
        answer_seconds: longest wait for the answer to a short question.
        silence_seconds: longest silence while responses are streamed; the server sends a heartbeat each second.
        stall_seconds: longest time that the engine's thread may take for one token or command.
        load_seconds: longest time that a push of weights may take to load.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str,
        answer_seconds: float = 20.0,
        silence_seconds: float = 20.0,
        stall_seconds: float = 120.0,
        load_seconds: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.answer_seconds = answer_seconds
        self.silence_seconds = silence_seconds
        self.stall_seconds = stall_seconds
        self.load_seconds = load_seconds
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self._session

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def health(self) -> ReplicaStatus:
        """Its status.

        Raises:
            ReplicaLostError: if it does not answer, or its engine's thread hangs.
            ReplicaRefusedError: if it refuses the token, or answers otherwise than a replica does.
        """
        answer = await self._ask("GET", "health", None, seconds=self.answer_seconds)
        try:
            status = ReplicaStatus(**json.loads(answer))
        except (ValueError, TypeError) as error:
            raise ReplicaRefusedError(f"{self.url} {NO_REPLICA} It answered {answer[:80]!r}.") from error
        self._check_stall(status)
        return status

    def _check_stall(self, status: ReplicaStatus) -> None:
        limit = self.stall_seconds if status.weight_version is not None else max(self.stall_seconds, self.load_seconds)
        if status.busy_for > limit:
            raise ReplicaLostError(
                f"{self.url} hangs: its engine has been at one token or command for {status.busy_for:.0f} s."
            )

    async def generate(self, requests: Sequence[Mapping[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """Yields a result for each request as it ends.

        Raises:
            ReplicaLostError: if the replica is lost before the last one; those yielded so far are whole.
            ValueError: if the replica refuses the requests.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.answer_seconds, sock_read=self.silence_seconds)
        waiting = {str(request["request_id"]) for request in requests}
        try:
            async with self._open().post(
                f"{self.url}/generate", json={"requests": list(requests)}, timeout=timeout, read_bufsize=1 << 24
            ) as response:
                if response.status != 200:
                    self._refuse(response.status, await response.text(), "generate")
                async for raw in response.content:
                    line = json.loads(raw)
                    if "request_id" not in line:
                        self._check_stall(ReplicaStatus(**line))
                        continue
                    waiting.discard(line["request_id"])
                    yield line
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaLostError(f"{self.url} was lost while it sampled: {_what(error)}.") from error
        if waiting:
            raise ReplicaLostError(f"{self.url} ended its answer without {len(waiting)} of {len(requests)} responses.")

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """Ends requests, all for None; returns how many."""
        body = await self._post("abort", {"request_ids": None if request_ids is None else list(request_ids)})
        return int(json.loads(body)["aborted"])

    async def pause(self, mode: str) -> None:
        """Stops between two tokens (``keep``), or ends what is in flight as well (``abort``)."""
        await self._post("pause", {"mode": mode})

    async def resume(self) -> None:
        """Goes on."""
        await self._post("resume", {})

    async def load(self, info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Has it load a push of weights."""
        await self._post("weights", {"info": info}, seconds=self.load_seconds)

    async def set_version(self, version: int | None) -> None:
        """Names the version of the weights; None: not to be used."""
        await self._post("version", {"version": version})

    async def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of what it holds under these names."""
        from safetensors.torch import load

        return load(await self._post("read_weights", {"names": list(names)}, seconds=self.load_seconds))

    async def reset_prefix_cache(self) -> None:
        """Forgets keys and values."""
        await self._post("reset_prefix_cache", {})

    async def _post(self, route: str, body: Mapping[str, Any], *, seconds: float | None = None) -> bytes:
        # a command waits for the token that is being computed
        return await self._ask("POST", route, body, seconds=seconds or self.answer_seconds + self.stall_seconds)

    async def _ask(self, method: str, route: str, body: Mapping[str, Any] | None, *, seconds: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._open().request(method, f"{self.url}/{route}", json=body, timeout=timeout) as response:
                content = await response.read()
                if response.status != 200:
                    self._refuse(response.status, content.decode(errors="replace"), route)
                return content
        except TimeoutError as error:
            raise ReplicaLostError(f"{self.url} did not answer /{route} within {seconds:g} s.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaLostError(f"{self.url} was lost at /{route}: {_what(error)}.") from error

    def _refuse(self, status: int, body: str, route: str) -> None:
        """Raises what the server's answer means."""
        try:
            message = str(json.loads(body)["error"])
        except (ValueError, KeyError):
            message = body[:500]
        if status == 409:
            raise ReplicaUnreadyError(f"{self.url}: {message}")
        if status == 401:
            raise ReplicaRefusedError(
                f"{self.url} refused the token: token= (or LIGHTNING_RLHF_REPLICA_TOKEN) must be the one that it was "
                f"started with."
            )
        if status == 404:
            raise ReplicaRefusedError(f"{self.url} {NO_REPLICA} There is no /{route}.")
        if status == 400:
            raise ValueError(f"{self.url}/{route}: {message}")
        raise RuntimeError(f"{self.url}/{route}: {message}")


def _what(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip()
