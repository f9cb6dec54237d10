from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.rollout.replica_agreement import check_room, coarsest_dtype, same_scores
from lightning_rlhf.rollout.replica_client import ReplicaClient
from lightning_rlhf.rollout.replica_seen import Replica

RIGHT = [[0.0, -1.0, -2.0]]


def replica(index: int, *, max_model_len: int | None = 64, dtype: str = "float32") -> Replica:
    client = ReplicaClient(f"http://127.0.0.1:{index}", token="t")
    return Replica(index=index, client=client, max_model_len=max_model_len, dtype=dtype)


@pytest.mark.parametrize("wrong", [-2.1, math.nan, -math.inf])
def test_replicas_that_differ(wrong: float) -> None:
    for answers in ([RIGHT, [[0.0, -1.0, wrong]]], [[[0.0, wrong, -2.0]], RIGHT]):
        with pytest.raises(RuntimeError, match=r"Two replicas differ by .* nats.*states"):
            same_scores(answers, describe=lambda: "states")


def test_replicas_that_agree() -> None:
    assert same_scores([RIGHT, [[0.0, -1.005, -2.0]]], describe=str) == RIGHT
    with pytest.raises(RuntimeError, match="differ by 4 nats"):
        same_scores([[[-math.inf, -1.0]], [[-math.inf, -5.0]]], describe=str)
    both = [[0.0, math.nan]]
    assert same_scores([both, [[0.0, math.nan]]], describe=str) == both  # the receipt says what is wrong with that


def test_a_replica_that_would_cut_responses_short_is_refused() -> None:
    check_room([replica(0), replica(1, max_model_len=None)], max_model_len=64)
    with pytest.raises(ValueError, match=r"Replica 1 at http://127\.0\.0\.1:1 takes 48 tokens.*max_model_len=64"):
        check_room([replica(0), replica(1, max_model_len=48)], max_model_len=64)


def test_one_replica_in_bf16_is_enough() -> None:
    assert coarsest_dtype([replica(0)]) is torch.float32
    assert coarsest_dtype([replica(0), replica(1, dtype="bfloat16")]) is torch.bfloat16
