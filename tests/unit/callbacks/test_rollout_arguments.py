"""Arguments of rollout and weight sync that mean something else than they seem to: refused where they are given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_rlhf.callbacks import HFRollout, VLLMRollout, WeightSync
from lightning_rlhf.callbacks.served_rollout import ServerSettings
from lightning_rlhf.contracts.rollout import Guide
from lightning_rlhf.environments import ToolEnvironment

URL = "http://127.0.0.1:8100"

SAMPLING: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"stop": "</a>"}, ValueError, r"stop is a list of texts, got '</a>'.*stop=\['</a>'\]"),
    ({"stop_token_ids": 5}, TypeError, r"stop_token_ids=5 must be a list of ids"),
    ({"stop_token_ids": ["a"]}, TypeError, r"stop_token_ids=\('a',\) must be a list of ids"),
    ({"temperature": math.nan}, ValueError, r"temperature=nan \(0, or >= 0\.01\)"),
    ({"temperature": math.inf}, ValueError, r"temperature=inf"),
    ({"temperature": 1e-3}, ValueError, r"temperature=0\.001 \(0, or >= 0\.01\)"),  # vLLM would sample at 0.01
    ({"seed": -1}, ValueError, r"seed must not be negative, got -1"),
    ({"top_k": -1}, ValueError, r"top_k=-1 \(>= 0, 0 keeps all\)"),
    ({"num_rollouts": 2.5}, TypeError, r"n=2\.5 must be an integer"),
    ({"max_new_tokens": 2.5}, TypeError, r"max_new_tokens=2\.5 must be an integer"),
    ({"environment": ToolEnvironment()}, TypeError, r"a class or functools\.partial.*one of ToolEnvironment"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), SAMPLING)
@pytest.mark.parametrize("rollout", [HFRollout, VLLMRollout])
def test_sampling(rollout: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rollout(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"guide": "[0-9]+"}, TypeError, r"guide='\[0-9\]\+' must be a Guide"),
        ({"dtype": "fp32"}, ValueError, r"dtype='fp32'\): vLLM's weights are 'float32' or 'bfloat16'"),
        ({"max_num_seqs": 0}, ValueError, r"max_num_seqs=0 and kv_cache_bytes=\d+ must be at least 1"),
        ({"mode": "server", "urls": URL}, ValueError, r"urls= is a list, got one text: say urls=\['http"),
        ({"mode": "server", "urls": ["localhost:8100"]}, ValueError, r"begin with http:// or https://, got \['local"),
        ({"mode": "server", "urls": [URL, f"{URL}/"]}, ValueError, r"names a replica twice"),
        ({"mode": "server", "server": {"start_seconds": -1.0}}, ValueError, r"start_seconds=-1\.0 .* more than 0"),
        ({"mode": "server", "server": {"max_deaths": -1}}, ValueError, r"max_deaths=-1 at least 0"),
    ],
)
def test_vllm(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        VLLMRollout(**arguments)


@pytest.mark.parametrize("token", ["secret\n", " secret", "se\x07cret"])
def test_a_token_with_what_a_header_cannot_hold(token: str) -> None:
    with pytest.raises(ValueError, match="white space or a line's end"):
        ServerSettings(urls=[URL], token=token).token_of_urls()


def test_lists_of_a_configuration_are_taken() -> None:
    rollout = VLLMRollout(stop=["</a>"], stop_token_ids=[5], guide=Guide(regex="a"), top_p=0.5, num_rollouts=3)
    assert (rollout.sampling.stop, rollout.sampling.stop_token_ids) == (("</a>",), (5,))
    evaluated = rollout.eval_sampling
    assert (evaluated.n, evaluated.temperature, evaluated.top_p, evaluated.stop) == (1, 0.0, 1.0, ("</a>",))
    assert evaluated.guide == Guide(regex="a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": True}, r"every=True\): expected 'optimizer_step', 'rollout' or a number"),
        ({"every": 0}, r"every=0\): expected"),
        ({"every": 1.5}, r"every=1\.5\): expected"),
        ({"probe_tolerance": math.nan}, r"probe_tolerance=nan\): expected nats, at least 0"),
        ({"probe_tolerance": -1.0}, r"probe_tolerance=-1\.0\): expected nats, at least 0"),
    ],
)
def test_weight_sync(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightSync(**arguments)
