"""A real server on the loopback that answers as each row asks for."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lightning_rlhf.rewards import Failure, RemoteReward, score

TOKEN = "open-sesame"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Server = self.server  # type: ignore[assignment]
        with server.lock:
            server.bodies.append(body)
            server.seen[body["response"]] += 1
            count = server.seen[body["response"]]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"who are you?")
        match body["response"].split():
            case ["status", status]:
                return self.answer(int(status), b"no")
            case ["later", number] if count <= int(number):
                return self.answer(503, b"busy")
            case ["hang up"] | ["hangup"]:
                return self.connection.close()
            case ["drip"]:
                # a byte now and then: no read waits long, the whole would never end
                self.send_response(200)
                self.end_headers()
                for _ in range(100):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.1)
                return None
            case ["say", *words]:
                return self.answer(200, " ".join(words).encode())
            case ["flood"]:
                return self.answer(200, b" " * (3 << 20))
            case ["move"]:
                self.send_response(307)
                self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")  # type: ignore[attr-defined]
                self.end_headers()
                return None
        return self.answer(200, json.dumps({"reward": float(len(body["response"]))}).encode())

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []

    def handle_error(self, *_: Any) -> None:
        """A client that has hung up is no news."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def remote(server: Server, **arguments: Any) -> RemoteReward:
    settings = {"token_env": "REWARD_TOKEN", "backoff": 0.01, "retries": 2, "seconds": 5.0, **arguments}
    return RemoteReward(f"http://127.0.0.1:{server.server_port}/score", **settings)


def of(reward: RemoteReward, responses: list[str]) -> list[float | Failure]:
    return reward(["p"] * len(responses), responses, [{"row": i} for i in range(len(responses))])


def test_rows_are_asked_for_and_fail_one_by_one(server: Server) -> None:
    found = of(remote(server), ["four", "status 400", "later 2", "later 3", "status 500", "hangup", "threes"])
    assert [found[0], found[2], found[6]] == [4.0, 7.0, 6.0]
    address = f"127.0.0.1:{server.server_port}"
    assert found[1] == Failure(f"{address} answered 400: no")
    assert found[3] == Failure(f"{address} answered 503: busy (try 3 of 3)")
    assert found[4] == Failure(f"{address} answered 500: no (try 3 of 3)")
    assert isinstance(found[5], Failure)
    assert "Disconnected" in found[5].reason
    asked = {name: server.seen[name] for name in ("four", "status 400", "later 2", "status 500", "hangup")}
    assert asked == {"four": 1, "status 400": 1, "later 2": 3, "status 500": 3, "hangup": 3}
    assert {"prompt": "p", "response": "threes", "metadata": {"row": 6}} in server.bodies


def test_h04_a_service_that_never_ends_its_answer_fails_its_row_within_the_limit(server: Server) -> None:
    begun = time.monotonic()
    scores = score(remote(server, seconds=0.6, retries=0), ["p"] * 3, ["drip", "one", "two"], [{}] * 3)
    assert time.monotonic() - begun < 5.0
    assert scores.rewards.isnan().tolist() == [True, False, False]
    assert scores.errors == [f"row 0, remote: no answer from 127.0.0.1:{server.server_port} within 0.6 s (try 1 of 1)"]


def test_an_endless_answer_is_not_kept(server: Server) -> None:
    found = of(remote(server), ["flood"])
    assert found == [Failure(f"127.0.0.1:{server.server_port} answered more than 1048576 bytes")]


def test_all_tries_together_have_a_limit(server: Server) -> None:
    begun = time.monotonic()
    found = of(remote(server, retries=50, backoff=0.2, total_seconds=0.5), ["status 500"])
    assert time.monotonic() - begun < 5.0
    assert found == [Failure("over its limit of 0.5 s with all tries", "wall")]
    assert 1 <= server.seen["status 500"] < 5


def test_waits_double(server: Server) -> None:
    begun = time.monotonic()
    of(remote(server, retries=3, backoff=0.2), ["status 500"])
    assert time.monotonic() - begun > 0.5 * (0.2 + 0.4 + 0.8)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('{"reward": null}', "no verdict"),
        ('{"reward": "1"}', "must be a number, got '1'"),
        ('{"reward": true}', "must be a number, got True"),
        ('{"score": 1}', "must be {'reward': number}"),
        ("[1]", "must be {'reward': number}"),
        ("<html>", "no JSON"),
    ],
)
def test_an_answer_that_holds_no_number_fails_and_is_not_asked_for_again(
    server: Server, said: str, reason: str
) -> None:
    found = of(remote(server), [f"say {said}"])[0]
    assert isinstance(found, Failure)
    assert reason in found.reason
    assert sum(server.seen.values()) == 1


def test_a_number_that_is_not_finite_fails_its_row(server: Server) -> None:
    scores = score(remote(server), ["p"], ['say {"reward": NaN}'], [{}])
    assert scores.num_failed == 1


def test_the_token_is_sent_and_kept_out_of_sight(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = remote(server)
    assert TOKEN not in repr(vars(reward))
    assert of(remote(server, token_env=None), ["a"]) == [
        Failure(f"127.0.0.1:{server.server_port} answered 401: who are you?")
    ]
    # a redirect would carry it to another address
    assert of(reward, ["move"]) == [Failure(f"127.0.0.1:{server.server_port} answered 307: ")]
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(RuntimeError, match="environment variable REWARD_TOKEN, which is empty"):
        remote(server)


def test_nobody_listening_fails_every_row() -> None:
    found = of(RemoteReward("http://127.0.0.1:9/", retries=1, backoff=0.01), ["a", "b"])
    assert all(isinstance(one, Failure) and "(try 2 of 2)" in one.reason for one in found)


def test_metadata_that_is_no_json_can_be_left_out(server: Server) -> None:
    rows = (["p"], ["ab"], [{"id": 7, "thing": object()}])
    assert isinstance(remote(server)(*rows)[0], Failure)
    assert remote(server, fields=["id"])(*rows) == [2.0]
    assert server.bodies[-1]["metadata"] == {"id": 7}


def test_it_works_within_a_running_event_loop(server: Server) -> None:
    async def inside() -> list[float | Failure]:
        return of(remote(server), ["abc"])

    assert asyncio.run(inside()) == [3.0]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:80", "http://"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must start with http"):
        RemoteReward(url)


def test_numbers_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="retries=-1"):
        RemoteReward("http://localhost", retries=-1)


def test_what_breaks_the_asking_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where aiohttp cannot be imported: not an answer of the wrong length."""
    reward = RemoteReward("http://127.0.0.1:1/")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    scores = score(reward, ["p"] * 2, ["a", "b"], [{}, {}])
    assert scores.num_failed == 2
    assert "row 0, remote: ModuleNotFoundError: import of aiohttp halted" in scores.errors[0]


def test_a_missing_library_is_told_before_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"needs aiohttp: pip install 'lightning_rlhf\[remote\]'"):
        RemoteReward("http://127.0.0.1:1/score")
