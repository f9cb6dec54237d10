"""A reward that another machine computes, asked over HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lightning_rlhf.rewards.scores import Failure

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES = 1 << 20


class RemoteReward:
    """Asks a service for each row's reward: POST of ``{"prompt", "response", "metadata"}``, answer ``{"reward": 0.5}``.

    Rows are asked for side by side and fail one by one. No connection, no whole answer within ``seconds`` and a status
    of 500 or more are tried again, after waits that double from ``backoff`` with a random part; any other status but
    200 is not. ``{"reward": null}`` says that there is no verdict. Redirects are not followed, so that the token
    reaches no other address, and neither are proxies of the environment.

    Args:
        url: ``https://...`` or ``http://...``.
        token_env: environment variable that holds the token, sent as ``Authorization: Bearer ...``; None sends none.
            The token itself is no argument, for arguments are written into a run's files.
        seconds: for one try, from connecting to the last byte.
        retries: further tries after the first.
        backoff: seconds to wait before the first of them.
        total_seconds: for a row, with all tries and waits; None bounds it by these alone.
        workers: requests side by side.
        fields: which of a row's metadata are sent; None sends all, which must then be JSON.

    Raises:
        ValueError: for an address or numbers that cannot be meant.
        RuntimeError: if the environment variable is empty.
        ImportError: without aiohttp; names the extra to install.
    """

    __name__ = "remote"

    def __init__(
        self,
        url: str,
        *,
        token_env: str | None = None,
        seconds: float = 10.0,
        retries: int = 3,
        backoff: float = 0.5,
        total_seconds: float | None = None,
        workers: int = 16,
        fields: list[str] | None = None,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"url must start with http:// or https:// and name a host, got {url!r}.")
        if not (seconds > 0 and retries >= 0 and backoff >= 0 and workers >= 1 and (total_seconds or 1) > 0):
            raise ValueError(
                f"seconds and total_seconds must be positive, retries and backoff 0 or more, workers 1 or more; got "
                f"seconds={seconds}, total_seconds={total_seconds}, retries={retries}, backoff={backoff}, "
                f"workers={workers}."
            )
        if importlib.util.find_spec("aiohttp") is None:  # here, for later it would fail row after row
            raise ImportError("RemoteReward needs aiohttp: pip install 'lightning_rlhf[remote]'.")
        if token_env is not None and not os.environ.get(token_env):
            raise RuntimeError(f"RemoteReward reads its token from environment variable {token_env}, which is empty.")
        self.url = url
        self.token_env = token_env
        self.seconds, self.total_seconds = seconds, total_seconds
        self.retries, self.backoff = retries, backoff
        self.workers = workers
        self.fields = fields

    def __call__(
        self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]
    ) -> list[float | Failure]:
        """One number per row; a ``Failure`` with the last try's reason where there is none."""
        rows = [
            {"prompt": prompt, "response": response, "metadata": self._selected(facts)}
            for prompt, response, facts in zip(prompts, responses, metadata, strict=True)
        ]
        # in a thread of its own: the caller's may run an event loop already
        with ThreadPoolExecutor(1, thread_name_prefix="remote_reward") as pool:
            return pool.submit(lambda: asyncio.run(self._ask_all(rows))).result()

    def _selected(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return metadata if self.fields is None else {name: metadata.get(name) for name in self.fields}

    async def _ask_all(self, rows: list[dict[str, Any]]) -> list[float | Failure]:
        import aiohttp

        token = os.environ.get(self.token_env, "") if self.token_env is not None else ""
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=aiohttp.ClientTimeout(total=self.seconds),
            connector=aiohttp.TCPConnector(limit=self.workers),
        ) as session:
            turns = asyncio.Semaphore(self.workers)
            return list(await asyncio.gather(*(self._ask_row(session, row, turns) for row in rows)))

    async def _ask_row(
        self, session: aiohttp.ClientSession, row: dict[str, Any], turns: asyncio.Semaphore
    ) -> float | Failure:
        try:
            body = json.dumps(row).encode()
        except (TypeError, ValueError) as error:
            return Failure(f"its metadata is no JSON ({error}); say fields=[...] to send some of it")
        async with turns:
            try:
                async with asyncio.timeout(self.total_seconds):
                    return await self._try_row(session, body)
            except TimeoutError:
                return Failure(f"over its limit of {self.total_seconds} s with all tries", "wall")

    async def _try_row(self, session: aiohttp.ClientSession, body: bytes) -> float | Failure:
        failure = Failure("not asked")
        for number in range(1 + self.retries):
            if number:
                # the random part keeps rows that failed together from coming back together
                await asyncio.sleep(self.backoff * 2 ** (number - 1) * random.uniform(0.5, 1.5))
            answer, again = await self._ask(session, body)
            if not isinstance(answer, Failure) or not again:
                return answer
            failure = Failure(f"{answer.reason} (try {number + 1} of {1 + self.retries})", answer.cause)
        return failure

    async def _ask(self, session: aiohttp.ClientSession, body: bytes) -> tuple[float | Failure, bool]:
        """The row's reward or why there is none, and whether it is worth another try."""
        import aiohttp

        headers = {"Content-Type": "application/json"}
        try:
            async with session.post(self.url, data=body, headers=headers, allow_redirects=False) as response:
                status, content = response.status, b""
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        return Failure(f"{self._host} answered more than {MAX_ANSWER_BYTES} bytes"), False
        except TimeoutError:
            return Failure(f"no answer from {self._host} within {self.seconds:g} s", "wall"), True
        except aiohttp.ClientError as error:
            return Failure(f"{self._host}: {type(error).__name__}: {error}"), True
        if status != 200:
            said = content[:100].decode("utf-8", errors="replace")
            return Failure(f"{self._host} answered {status}: {said}"), status >= 500
        return _reward_in(content), False

    @property
    def _host(self) -> str:
        return urlsplit(self.url).netloc.rpartition("@")[2]


def _reward_in(content: bytes) -> float | Failure:
    try:
        answer = json.loads(content)
    except ValueError:
        return Failure(f"the answer is no JSON: {content[:60]!r}")
    if not isinstance(answer, dict) or "reward" not in answer:
        return Failure(f"the answer must be {{'reward': number}}, got {content[:60]!r}")
    reward = answer["reward"]
    if reward is None:
        return Failure("the service has no verdict")
    if isinstance(reward, bool) or not isinstance(reward, (int, float)):
        return Failure(f"the answer's reward must be a number, got {reward!r:.60}")
    return float(reward)
