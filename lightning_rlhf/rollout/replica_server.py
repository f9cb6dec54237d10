"""A replica's HTTP server: tokens in, tokens out. Every route asks for the token; it listens where it is told, no more.

| route | what |
|---|---|
| GET /health | `ReplicaStatus` |
| POST /generate | ``{"requests": [...]}``; a line of JSON for each as it ends, a heartbeat each second |
| POST /abort | ``{"request_ids": [...] or null}`` |
| POST /pause, /resume | ``{"mode": "keep" or "abort"}`` |
| POST /weights | ``{"info": ...}``: loads a push; the version is gone until /version |
| POST /version | ``{"version": 3 or null}`` |
| POST /read_weights | ``{"names": [...]}``: as safetensors |
| POST /reset_prefix_cache | |

An error is ``{"error": message, "kind": class}`` with status 400 (the request), 409 (no valid weights) or 500.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from aiohttp import web

from lightning_rlhf.rollout.replica_engine import NoWeightsError, ReplicaEngine
from lightning_rlhf.rollout.vllm_request import VLLMRequest

T = TypeVar("T")
HEARTBEAT_SECONDS = 1.0
LARGEST_BODY = 1 << 30


def result_line(request: VLLMRequest) -> dict[str, Any]:
    """What came out for one request; versions as spans ``[version, start, end)``."""
    spans: list[list[int]] = []
    for place, version in enumerate(request.token_versions):
        if not spans or spans[-1][0] != version:
            spans.append([version, place, place])
        spans[-1][2] = place + 1
    line: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": request.token_ids,
        "log_probs": request.log_probs,
        "versions": spans,
        "finish_reason": request.finish_reason,
    }
    if request.prompt_scores is not None:
        line["prompt_log_probs"] = request.prompt_log_probs()
    return line


class ReplicaServer:
    """The routes.

    Args:
        engine: what they talk to.
        token: what ``Authorization: Bearer`` must bring.
    """

    def __init__(self, engine: ReplicaEngine, *, token: str) -> None:
        if not token:
            raise ValueError("A replica needs a token: whoever reaches its port could read and replace the weights.")
        self.engine = engine
        self._expected = f"Bearer {token}".encode()

    def application(self) -> web.Application:
        """The aiohttp application."""
        application = web.Application(middlewares=[self._guard], client_max_size=LARGEST_BODY)
        application.router.add_get("/health", self.health)
        for route in (
            self.generate,
            self.abort,
            self.pause,
            self.resume,
            self.weights,
            self.version,
            self.read_weights,
            self.reset_prefix_cache,
        ):
            application.router.add_post(f"/{route.__name__}", route)
        return application

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(errors="replace"), self._expected):
            return _error("The token is missing or wrong.", kind="Unauthorized", status=401)
        try:
            return await handler(request)
        except NoWeightsError as error:
            return _error(str(error), kind="NoWeightsError", status=409)
        except (ValueError, KeyError, TypeError) as error:
            return _error(str(error), kind=type(error).__name__, status=400)
        except (RuntimeError, OSError) as error:
            return _error(str(error), kind=type(error).__name__, status=500)

    async def health(self, request: web.Request) -> web.Response:
        """The status."""
        return web.json_response(asdict(self.engine.status()))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Streams a line for each request as it ends; a client that goes away ends its requests."""
        requests = (await request.json())["requests"]
        arrived: asyncio.Queue[VLLMRequest] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_done(done: VLLMRequest) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, done)

        await asyncio.wrap_future(self.engine.add(requests, on_done))
        waiting = {str(one["request_id"]) for one in requests}
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            await response.prepare(request)
            while waiting:
                line: dict[str, Any] = {}
                with suppress(TimeoutError):
                    line = result_line(await asyncio.wait_for(arrived.get(), HEARTBEAT_SECONDS))
                    waiting.discard(line["request_id"])
                await response.write(json.dumps(line or asdict(self.engine.status())).encode() + b"\n")
            await response.write_eof()
        finally:
            if waiting:
                self.engine.abort(sorted(waiting))
        return response

    async def abort(self, request: web.Request) -> web.Response:
        """Ends requests."""
        ended = await self._wait(self.engine.abort((await request.json())["request_ids"]))
        return web.json_response({"aborted": ended})

    async def pause(self, request: web.Request) -> web.Response:
        """Stops between two tokens."""
        await self._wait(self.engine.pause((await request.json())["mode"]))
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        """Goes on."""
        await self._wait(self.engine.resume())
        return web.json_response({})

    async def weights(self, request: web.Request) -> web.Response:
        """Loads a push."""
        await self._wait(self.engine.update_weights((await request.json())["info"]))
        return web.json_response({})

    async def version(self, request: web.Request) -> web.Response:
        """Names the version of the weights."""
        await self._wait(self.engine.set_version((await request.json())["version"]))
        return web.json_response({})

    async def read_weights(self, request: web.Request) -> web.Response:
        """Copies of tensors."""
        from safetensors.torch import save

        tensors = await self._wait(self.engine.read_weights((await request.json())["names"]))
        return web.Response(body=save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Forgets keys and values."""
        await self._wait(self.engine.reset_prefix_cache())
        return web.json_response({})

    async def _wait(self, future: Future[T]) -> T:
        return await asyncio.wrap_future(future)


def _error(message: str, *, kind: str, status: int) -> web.Response:
    return web.json_response({"error": message, "kind": kind}, status=status)
