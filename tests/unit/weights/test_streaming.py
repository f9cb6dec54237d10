"""Copies past the cache: every byte, nothing beside them, on any number of threads."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import pytest
import torch

from lightning_rlhf.weights.copy_loops import DECLARATIONS, copy_assembly
from lightning_rlhf.weights.streaming import STREAM_BYTES, copy_bytes


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [0, 1, 255, STREAM_BYTES - 1, STREAM_BYTES, STREAM_BYTES + 1, (9 << 20) + 77])
@pytest.mark.parametrize(("before", "source_at"), [(0, 0), (1, 5), (17, 32), (63, 63), (64, 1)])
def test_every_byte_and_no_other(threads: int, size: int, before: int, source_at: int) -> None:
    memory = torch.full((before + size + 300,), 7, dtype=torch.uint8)
    source = torch.randint(0, 256, (source_at + size,), dtype=torch.uint8)[source_at:]
    copy_bytes(memory[before : before + size], source)
    assert torch.equal(memory[before : before + size], source)
    assert bool((memory[:before] == 7).all()), "wrote in front of the destination"
    assert bool((memory[before + size :] == 7).all()), "wrote behind the destination"


def test_a_forked_process_starts_threads_of_its_own() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        source = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8)
        copy_bytes(torch.empty_like(source), source)  # the threads run now
        child = os.fork()
        if child == 0:
            code = 1
            try:
                copied = torch.empty(len(source), dtype=torch.uint8)
                copy_bytes(copied, source)
                code = 0 if copied.numpy().tobytes() == source.numpy().tobytes() else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("destination", "source", "message"),
    [
        (torch.zeros(8, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8), "9 bytes do not fit 8"),
        (torch.zeros(8, dtype=torch.int8), torch.zeros(8, dtype=torch.uint8), "torch.int8"),
        (torch.zeros(16, dtype=torch.uint8)[::2], torch.zeros(8, dtype=torch.uint8), r"\(2,\)"),
        (torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), r"\[2, 4\]"),
    ],
)
def test_other_tensors_are_refused(destination: torch.Tensor, source: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        copy_bytes(destination, source)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are those of x86's instructions")
def test_the_stores_go_past_the_cache() -> None:
    import llvmlite.binding as llvm  # not above: with it loaded, vLLM alone cannot start in a forked process

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    written = machine.emit_assembly(
        llvm.parse_assembly("\n".join([copy_assembly("copy", past_cache=True), DECLARATIONS]))
    )
    assert "movnt" in written
    assert written.index("movnt") < written.index("fence"), "what follows may be seen before the bytes"
