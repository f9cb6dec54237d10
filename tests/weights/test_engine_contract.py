"""One contract for all checkpoint engines: what arrives, and what happens when a peer does not do its part."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import in_own_process
from support.receivers import Forked, Packed, Receiver, came_through_a_pipe, pack, push, push_stream
from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, Invitation
from lightning_rlhf.weights import PeerError
from lightning_rlhf.weights.kimi import import_kimi_server

needs_package = pytest.mark.skipif(find_spec("checkpoint_engine") is None, reason="needs checkpoint-engine")
ENGINES = ["shm", "shm-piped", "nccl", "nixl", "disk", "delta", pytest.param("kimi", marks=needs_package)]
BUCKET_BYTES = 8192
TIMEOUT = 2.0
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.fixture(autouse=True, scope="module")
def packages_are_imported() -> None:
    """Here, once: in a receiver it would take longer than the sender waits."""
    if find_spec("checkpoint_engine") is not None:
        import_kimi_server()


def new_engine(name: str, folder: Path, **kwargs: Any) -> CheckpointEngine:
    os.environ.update(NIXL_LOG_LEVEL="ERROR", UCX_TLS="posix,self,cma,tcp", UCX_NET_DEVICES="lo")
    special: dict[str, dict[str, Any]] = {
        "disk": {"folder": str(folder)},
        "delta": {"dense_every": 10},
        "kimi": {"portion_bytes": 65536},
    }
    arguments = {"bucket_bytes": BUCKET_BYTES, "timeout": TIMEOUT, "tied": TIED, **special.get(name, {}), **kwargs}
    engine = CheckpointEngineRegistry.new(name.removesuffix("-piped"), **arguments)
    engine.prepare()
    return engine


def new_receiver(name: str, invitation: Invitation) -> Receiver:
    """One that has memory of its own for all tensors but two, if they come through a pipe."""
    own = {one: torch.zeros_like(tensor) for one, tensor in model().items()}
    del own["odd.int64"], own["model.layers.0.mlp.up_proj.weight"]
    return Receiver(invitation, own=own if name == "shm-piped" else None)


def model() -> dict[str, Tensor]:
    """Small, but with everything that has gone wrong somewhere."""
    draw = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(90, 61, generator=draw)}  # 2.7 buckets
    for layer in range(2):
        at = f"model.layers.{layer}."
        tensors[f"{at}self_attn.q_proj.weight"] = torch.randn(12, 61, generator=draw).bfloat16()
        tensors[f"{at}mlp.gate_proj.weight"] = torch.randn(61, 70, generator=draw).bfloat16()  # larger than a bucket
        tensors[f"{at}self_attn.k_proj.weight"] = torch.randn(4, 61, generator=draw).bfloat16()
        tensors[f"{at}mlp.up_proj.weight"] = torch.randn(61, 70, generator=draw).bfloat16()
        tensors[f"{at}self_attn.v_proj.weight"] = torch.randn(4, 61, generator=draw).bfloat16()
        tensors[f"{at}mlp.down_proj.weight"] = torch.randn(61, 40, generator=draw).half().T  # not contiguous
        tensors[f"{at}mlp.gate.bias"] = torch.tensor([1.0010, 1.0020])  # D06: stays fp32
    tensors |= {
        "odd.int8": torch.arange(-5, 8, dtype=torch.int8),
        "odd.uint8": torch.arange(7, dtype=torch.uint8).reshape(7, 1, 1),
        "odd.bool": torch.tensor([True, False, True]),
        "odd.fp8": torch.randn(33, generator=draw).to(torch.float8_e4m3fn),
        "odd.int64": torch.tensor(2**40 + 1),
        "odd.fp64": torch.randn(1, 3, generator=draw, dtype=torch.float64),
        "odd.nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "empty.rows": torch.zeros(0, 5),
        "empty.columns": torch.zeros(4, 0, dtype=torch.bfloat16),
    }
    return tensors


def changed(tensors: dict[str, Tensor], round_: int) -> dict[str, Tensor]:
    """The next version: some elements of some tensors."""
    for name, tensor in tensors.items():
        if round_ and tensor.numel() > 4 and name.startswith("model."):
            tensor[0] += 0.5 * round_
    return tensors


def expected(tensors: dict[str, Tensor]) -> dict[str, Packed]:
    packed = {name: pack(tensor) for name, tensor in tensors.items()}
    return packed | {second: packed[first] for second, first in TIED.items() if first in packed}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("count", [2, 3])
def test_contents_are_equal_bit_for_bit_in_three_rounds(name: str, count: int, tmp_path: Path) -> None:
    def body() -> None:
        engine = new_engine(name, tmp_path)
        names = [f"r{index}" for index in range(count)]
        receivers = [new_receiver(name, engine.invitation(one)) for one in names]
        tensors = model()
        for round_ in range(3 if count == 2 else 1):
            tensors = changed(tensors, round_)
            for receiver in receivers:
                receiver.sync()
            # the trainer may bring a tied tensor under both names, or under the first one only
            both = {"lm_head.weight": tensors["model.embed_tokens.weight"]} if round_ == 1 else {}
            push(engine, names, tensors | both)
            for receiver in receivers:
                got = receiver.result()
                assert got == expected(tensors), (round_, got)
                _check_groups_are_together(list(got))
        assert came_through_a_pipe(engine) == (name == "shm-piped")
        engine.close()

    in_own_process(body, timeout=90.0)


def _check_groups_are_together(names: list[str]) -> None:
    first = names.index("model.layers.1.self_attn.q_proj.weight")
    assert [one.split(".")[4] for one in names[first : first + 3]] == ["q_proj", "k_proj", "v_proj"]
    first = names.index("model.layers.0.mlp.gate_proj.weight")
    assert names[first + 1] == "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("name", ENGINES)
def test_a_subset_brings_fused_layers_whole_or_is_refused(name: str, tmp_path: Path) -> None:
    def body() -> None:
        engine = new_engine(name, tmp_path, tied={})
        receiver = new_receiver(name, engine.invitation("r0"))
        some = {name: tensor for name, tensor in model().items() if "layers.1.self_attn" in name or "odd" in name}
        receiver.sync()
        push(engine, ["r0"], some)
        assert receiver.result() == {name: pack(tensor) for name, tensor in some.items()}
        receiver.sync()
        del some["model.layers.1.self_attn.k_proj.weight"]
        with pytest.raises(PeerError, match=r"r0.*q_proj.* came without .*layers\.1\.self_attn\.k_proj"):
            push(engine, ["r0"], some)
        assert "k_proj" in receiver.result()
        engine.close()

    in_own_process(body, timeout=90.0)


PHASE_OF_DEATH = {
    "group": ("group",),
    "begin": ("group", "begin"),
    "receive": ("receive", "load"),
    "load": ("receive", "load"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_death_of_a_receiver_in_each_phase(name: str, tmp_path: Path) -> None:
    """A bounded error that names the peer and the phase; the other receiver lives, and takes the next sync."""

    def body() -> None:
        engine = new_engine(name, tmp_path)
        survivor = new_receiver(name, engine.invitation("alive"))
        victims = {phase: new_receiver(name, engine.invitation(f"dies-in-{phase}")) for phase in PHASE_OF_DEATH}
        tensors = model()
        for phase, victim in victims.items():
            if phase == "group" and name == "disk":
                continue  # a folder has nothing to attach to
            for receiver in (survivor, victim):
                receiver.sync(phase if receiver is victim else "")
            start = time.monotonic()
            stream = iter(tensors.items())
            with pytest.raises(PeerError) as caught:
                push_stream(engine, ["alive", f"dies-in-{phase}"], stream)
            assert time.monotonic() - start < 4 * TIMEOUT
            assert f"dies-in-{phase}" in str(caught.value), caught.value
            assert caught.value.phase in PHASE_OF_DEATH[phase], caught.value
            if phase in ("receive", "load"):
                assert next(stream, None) is None  # drained: other trainer ranks gather with this one
            answer = survivor.result()
            assert isinstance(answer, str) or phase in ("load", "receive"), answer
        survivor.sync()
        push(engine, ["alive"], tensors)
        assert survivor.result() == expected(tensors)
        engine.close()

    in_own_process(body, timeout=90.0)


@pytest.mark.parametrize("name", ENGINES)
def test_the_death_of_the_sender(name: str, tmp_path: Path) -> None:
    """The receiver's error is bounded and names the sender; after that it can serve another sender."""

    def dying_sender(pipe: Any) -> None:
        engine = new_engine(name, tmp_path)
        pipe.send(engine.invitation("r0"))

        def stream() -> Iterator[tuple[str, Tensor]]:
            for index, named_tensor in enumerate(model().items()):
                if index == 5:
                    time.sleep(0.2)
                    os._exit(9)
                yield named_tensor

        push_stream(engine, ["r0"], stream())

    def body() -> None:
        sender = Forked(dying_sender)
        receiver = new_receiver(name, sender.result())
        receiver.sync()
        start = time.monotonic()
        answer = receiver.result()
        assert "phase 'receive', peer 'sender at 127.0.0.1" in answer, answer
        assert time.monotonic() - start < 4 * TIMEOUT
        sender.wait()

    in_own_process(body, timeout=90.0)


@pytest.mark.parametrize("name", ENGINES)
def test_a_slow_receiver_is_waited_for_and_a_silent_one_is_not(name: str, tmp_path: Path) -> None:
    def body() -> None:
        engine = new_engine(name, tmp_path, timeout=2.0)
        quick, slow = (new_receiver(name, engine.invitation(one)) for one in ("quick", "slow"))
        tensors = model()
        quick.sync()
        slow.sync("slow")  # longer in all than the timeout, never silent for that long
        push(engine, ["quick", "slow"], tensors)
        assert quick.result() == slow.result() == expected(tensors)
        quick.sync()
        slow.sync("hang")
        start = time.monotonic()
        with pytest.raises(PeerError, match=r"phase '(receive|load)', peer 'slow': no answer within"):
            push(engine, ["quick", "slow"], tensors)
        assert time.monotonic() - start < 8.0
        slow.kill()
        engine.close()

    in_own_process(body, timeout=90.0)


@pytest.mark.parametrize("name", ENGINES)
def test_one_flipped_bit_is_found_and_the_next_sync_is_good(name: str, tmp_path: Path) -> None:
    def body() -> None:
        engine = new_engine(name, tmp_path)
        broken, whole = new_receiver(name, engine.invitation("broken")), new_receiver(name, engine.invitation("whole"))
        tensors = model()
        broken.sync("flip")
        with pytest.raises(PeerError, match=r"peer 'broken': BucketError: .*corrupted: .*checksum"):
            push(engine, ["broken"], tensors)
        assert "corrupted" in broken.result()
        whole.sync()
        push(engine, ["whole"], tensors)
        assert whole.result() == expected(tensors)
        engine.close()

    in_own_process(body, timeout=90.0)


@pytest.mark.parametrize("name", ENGINES)
def test_a_consumer_that_fails_is_reported_and_may_join_again(name: str, tmp_path: Path) -> None:
    def body() -> None:
        engine = new_engine(name, tmp_path)
        receiver = new_receiver(name, engine.invitation("r0"))
        tensors = model()
        receiver.sync("raise")
        with pytest.raises(PeerError, match=r"peer 'r0': the consumer gave up"):
            push(engine, ["r0"], tensors)
        assert "disk is full" in receiver.result()
        tensors = changed(tensors, 1)
        receiver.sync()
        push(engine, ["r0"], tensors)
        assert receiver.result() == expected(tensors)
        engine.close()

    in_own_process(body, timeout=90.0)


@pytest.mark.parametrize("name", ENGINES)
def test_receivers_come_and_go_between_syncs(name: str, tmp_path: Path) -> None:
    def body() -> None:
        engine = new_engine(name, tmp_path)
        receivers = {one: new_receiver(name, engine.invitation(one)) for one in ("a", "b", "c")}
        tensors = model()
        for round_, members in enumerate((["a"], ["a", "b"], ["b", "c"])):
            tensors = changed(tensors, round_)
            for member in members:
                receivers[member].sync()
            push(engine, members, tensors)
            for member in members:
                assert receivers[member].result() == expected(tensors), (round_, member)
        with pytest.raises(PeerError, match=r"phase 'group', peer 'd': has not joined within 2 s"):
            push(engine, ["d"], tensors)
        engine.close()

    in_own_process(body, timeout=90.0)


@pytest.mark.parametrize("name", ENGINES)
def test_tensors_arrive_in_memory_of_the_consumer(name: str, tmp_path: Path) -> None:
    """Every second one: whole, spread over buckets, fused, tied, one in another dtype; then one of another shape."""

    def consumer(pipe: Any) -> None:
        invitation = pipe.recv()
        engine = CheckpointEngineRegistry.new(invitation.engine, **invitation.settings)
        engine.join(invitation)
        tensors = expected_tensors()
        own = {one: torch.zeros_like(tensor) for one, tensor in list(tensors.items())[::2]}
        own["odd.fp64"] = torch.zeros(1, 3)
        got = {}
        for one, tensor in engine.receive_weights(own):
            assert one not in own or tensor is own[one], one
            got[one] = pack(tensor)
        engine.finalize()
        pipe.send((got, {one: pack(tensor) for one, tensor in own.items()}))
        try:
            list(engine.receive_weights({"odd.int8": torch.zeros(3, dtype=torch.int8)}))
        except ValueError as error:
            pipe.send(str(error))

    def expected_tensors() -> dict[str, Tensor]:
        tensors = model()
        return tensors | {second: tensors[first] for second, first in TIED.items()}

    def body() -> None:
        engine = new_engine(name, tmp_path)
        receiver = Forked(consumer)
        receiver.pipe.send(engine.invitation("r0"))
        push(engine, ["r0"], model())
        got, own = receiver.result()
        assert got == expected(model()) | {"odd.fp64": pack(model()["odd.fp64"].float())}
        assert own == {one: got[one] for one in own}
        with pytest.raises(PeerError, match=r"odd.int8 is torch.int8 \[13\], but its destination is torch.int8 \[3\]"):
            push(engine, ["r0"], model())
        assert "destination" in receiver.result()
        engine.close()

    in_own_process(body, timeout=90.0)
