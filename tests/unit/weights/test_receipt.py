"""What a receipt says of numbers that are none."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.weights.receipt import check_read_back, probe_difference, sample_elements

TRAINER = torch.tensor([0.0, -1.0, -2.0])


def test_a_replica_of_nan_is_not_lost_among_others_that_are_right() -> None:
    right, broken = [0.0, -1.0, -2.0], [0.0, -1.0, math.nan]
    for answers in ([right, broken], [broken, right]):
        assert max(probe_difference(TRAINER, answer) for answer in answers) == math.inf
    assert max(probe_difference(TRAINER, answer) for answer in (right, right)) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_policy_that_is_broken_is_not_blamed_on_the_push(value: float) -> None:
    with pytest.raises(RuntimeError, match=r"log-prob of the trainer is NaN or infinite.*last checkpoint"):
        probe_difference(torch.tensor([0.0, value]), [0.0, value])
    weight = torch.ones(4, 4)
    weight[1, 2] = math.nan
    sent, held = {"w": sample_elements(weight)}, {"w": (sample_elements(weight), 0)}
    with pytest.raises(RuntimeError, match=r"version 3: w of the trainer is NaN"):
        check_read_back(sent, held, version=3, where="replica")


def test_a_replica_that_holds_nan_in_place_of_a_number_differs() -> None:
    sent = {"w": torch.ones(4)}
    with pytest.raises(RuntimeError, match=r"w in the rollout engine \(replica\) differs"):
        check_read_back(sent, {"w": (torch.full((4,), math.nan), 0)}, version=3, where="replica")
