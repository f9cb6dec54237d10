"""Which device an in-process engine takes; the engines themselves run here on machines without one."""

from __future__ import annotations

import pytest

from lightning_rlhf.rollout.vllm_device import device_number


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_takes_the_device_that_it_computes_on(rank: int) -> None:
    assert device_number(None, current=rank, count=4) == rank
    assert device_number(rank, current=rank, count=4) == rank


@pytest.mark.parametrize("local_rank", [None, 0, 3])
def test_without_devices_there_is_nothing_to_number(local_rank: int | None) -> None:
    assert device_number(local_rank, current=0, count=0) == 0


@pytest.mark.parametrize("local_rank", [-1, 4])
def test_a_device_that_is_not_there_is_refused(local_rank: int) -> None:
    with pytest.raises(ValueError, match=rf"local_rank={local_rank}: this process sees 4 device\(s\)"):
        device_number(local_rank, current=0, count=4)


def test_vllm_must_not_move_the_process_to_another_device() -> None:
    with pytest.raises(ValueError, match=r"device 0, but this process computes on device 2.*set_device\(0\)"):
        device_number(0, current=2, count=4)
