"""What of CUDA's inter-process memory needs no GPU: finding it, and handles as JSON."""

from __future__ import annotations

import json

import pytest
import torch

from lightning_rlhf.weights.cuda_ipc import handle_from_json, handle_to_json, local_index
from lightning_rlhf.weights.shm import ShmCheckpointEngine


def test_a_gpu_has_another_number_in_another_process() -> None:
    assert local_index("b", ["a", "b"]) == 1
    assert local_index("b", ["b"]) == 0


@pytest.mark.parametrize(("seen", "named"), [([], "none"), (["a", "c"], "a, c")])
def test_a_gpu_that_a_receiver_does_not_see_is_named(seen: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=f"GPU b, and this process sees {named}: .*CUDA_VISIBLE_DEVICES"):
        local_index("b", seen)


def test_a_handle_survives_json_without_the_senders_number_of_the_device() -> None:
    shared = (3, bytes(range(64)), 1 << 26, 512, b"/torch_1_2", 7, b"\x00\xff" * 32, True)
    assert handle_from_json(json.loads(json.dumps(handle_to_json(shared)))) == shared[1:]
    with pytest.raises(ValueError, match="zip"):
        handle_to_json(shared[:-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_memory_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="device='cuda:0': this process sees no GPU; use device='cpu'"):
        ShmCheckpointEngine(device="cuda:0")
