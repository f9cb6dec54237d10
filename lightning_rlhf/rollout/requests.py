"""Requests to replicas on the trainer's side, and the account of them: none is lost, none is counted twice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rlhf.rollout.responses import SampledResponse
from lightning_rlhf.rollout.vllm_request import GUIDE


@dataclass(kw_only=True)
class PendingRequest:
    """One response that is wanted, and what there is of it so far.

    Attributes:
        request_id: its own in the whole run, over all ranks.
        prompt: ids.
        params: vLLM's sampling parameters by name, ``max_tokens`` and ``seed`` among them.
        token_ids: of the response so far, over all replies.
        log_probs: of each of them.
        token_versions: of the weights that sampled each of them.
        finish_reason: of the response; empty until it is whole.
        prompt_log_probs: of each id of the prompt, where they were asked for.
        losses: how often its replica was lost.
        parts: how many replies hold tokens of it: more than one if it went on elsewhere.
        final_abort: set when the run itself ends it: what it has is then its answer.
    """

    request_id: str
    prompt: list[int]
    params: dict[str, Any]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prompt_log_probs: list[float] | None = None
    losses: int = 0
    parts: int = 0
    final_abort: bool = False

    def body(self) -> dict[str, Any]:
        """What is sent: after an abort, the prompt with the tokens that it has, for the rest of them.

        The rest has a seed of its own, a hash of the first: the same one would draw the first tokens' numbers again.
        A response with a guide begins anew, since vLLM reads its form from the first token on.
        """
        if GUIDE in self.params:
            self.token_ids, self.log_probs, self.token_versions = [], [], []
        params = dict(self.params)
        if self.token_ids:
            params["max_tokens"] -= len(self.token_ids)
            key = f"{params['seed']}/{len(self.token_ids)}".encode()
            params["seed"] = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
        return {
            "request_id": self.request_id,
            "prompt_token_ids": [*self.prompt, *self.token_ids],
            "params": params,
        }

    def take(self, line: Mapping[str, Any]) -> bool:
        """Adds a reply; False if the request has to go on, because a replica ended it before its time.

        Raises:
            RuntimeError: if it was answered already.
        """
        if self.finish_reason:
            raise RuntimeError(f"Request {self.request_id} was answered twice.")
        self.token_ids += line["token_ids"]
        self.log_probs += line["log_probs"]
        for version, start, end in line["versions"]:
            self.token_versions += [version] * (end - start)
        self.prompt_log_probs = line.get("prompt_log_probs", self.prompt_log_probs)
        self.parts += bool(line["token_ids"])
        reason = str(line["finish_reason"])
        if reason == "abort" and not self.final_abort and len(self.token_ids) < self.params["max_tokens"]:
            return False
        self.finish_reason = reason
        return True

    def response(self) -> SampledResponse:
        """The whole response."""
        return SampledResponse(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=self.finish_reason,
            token_versions=self.token_versions,
        )


@dataclass(kw_only=True)
class Ledger:
    """The account.

    Attributes:
        accepted: requests that were to be answered.
        answered: those that were.
        resent: sendings of a request beyond the first, because a replica was lost.
        continued: replies that a request needed beyond the first, because weights changed or a replica gave up.
        duplicates: replies to what was answered already, left out.
    """

    accepted: int = 0
    answered: int = 0
    resent: int = 0
    continued: int = 0
    duplicates: int = 0

    def accept(self, requests: Sequence[PendingRequest]) -> None:
        """Counts requests in."""
        self.accepted += len(requests)

    def settle(self, requests: Sequence[PendingRequest]) -> None:
        """Counts their answers.

        Raises:
            RuntimeError: if one has none, or ids, log-probs and versions do not match.
        """
        for request in requests:
            if not request.finish_reason:
                raise RuntimeError(f"Request {request.request_id} was left without an answer.")
            self.continued += max(0, request.parts - 1)
        self.answered += len(requests)
