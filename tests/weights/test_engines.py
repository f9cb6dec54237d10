"""What each checkpoint engine has of its own."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.mooncake import run_with_mooncake
from support.receivers import Forked, Receiver, came_through_a_pipe, pack
from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights import (
    DeltaCheckpointEngine,
    DiskCheckpointEngine,
    NaiveCheckpointEngine,
    PeerError,
    ShmCheckpointEngine,
)
from lightning_rlhf.weights.delta import DeltaTransform, changed_places
from lightning_rlhf.weights.disk import newest_snapshot, read_snapshot, snapshots
from lightning_rlhf.weights.shm_link import PREFIX, ShmSenderLink, remove_abandoned


def push(engine: Any, names: list[str], tensors: dict[str, Tensor]) -> None:
    engine.prepare()
    engine.init_process_group(engine.build_topology(trainer_world_size=1, receiver_ids=names))
    engine.send_weights(iter(tensors.items()))
    engine.finalize()


def in_own_process(body: Any) -> None:
    run_distributed(body, 1, init_process_group=False, timeout=60.0)


# --- naive -----------------------------------------------------------------------------------------------------------


def test_naive_hands_over_the_tensors_themselves() -> None:
    engine = NaiveCheckpointEngine()
    tensors = {"a": torch.ones(3), "empty": torch.zeros(0, 2), "fp8": torch.ones(2).to(torch.float8_e5m2)}
    for _ in range(3):
        engine.prepare()
        engine.init_process_group(engine.build_topology(trainer_world_size=1, receiver_ids=["local"]))
        engine.send_weights(iter(tensors.items()))
        assert [(name, id(tensor)) for name, tensor in engine.receive_weights()] == [
            (name, id(tensor)) for name, tensor in tensors.items()
        ]
        engine.finalize()
    with pytest.raises(ValueError, match=r"1 rank\(s\), but 2 replica\(s\)"):
        engine.init_process_group(engine.build_topology(trainer_world_size=1, receiver_ids=["a", "b"]))
    with pytest.raises(NotImplementedError, match="trainer's process only"):
        engine.invitation("a")


# --- shm -------------------------------------------------------------------------------------------------------------


def test_shm_leaves_no_file_even_if_killed(tmp_path: Path) -> None:
    def killed_while_its_files_have_names(pipe: Any) -> None:
        link = ShmSenderLink(tmp_path, 4096, ["r0"])
        pipe.send(link.offer("r0")["name"])
        os.kill(os.getpid(), signal.SIGKILL)

    def body() -> None:
        engine = ShmCheckpointEngine(bucket_bytes=4096, timeout=2.0, directory=str(tmp_path))
        engine.prepare()
        receiver = Receiver(engine.invitation("r0"))
        receiver.sync()
        push(engine, ["r0"], {"x": torch.ones(5000)})
        assert receiver.result() == {"x": pack(torch.ones(5000))}
        assert list(tmp_path.iterdir()) == []  # mapped by both, and nameless: nothing is left however this ends

    in_own_process(body)
    dead = Forked(killed_while_its_files_have_names)
    left = dead.result()
    dead.wait()
    assert left.startswith(PREFIX)
    assert [path.name for path in tmp_path.iterdir()] == [left]
    living = ShmSenderLink(tmp_path, 4096, ["r0"])  # removes it, and not its own
    assert [path.name for path in tmp_path.iterdir()] == [living.offer("r0")["name"]]
    assert remove_abandoned(tmp_path) == []
    living.close()
    assert list(tmp_path.iterdir()) == []


def test_shm_that_is_full_says_how_much_is_missing() -> None:
    engine = ShmCheckpointEngine(bucket_bytes=1 << 50, timeout=2.0)
    with pytest.raises(OSError, match=r"no room for \d+ bytes, 2 buckets of 1125899906842624 and more \(\d+ free\)"):
        engine.open_sender_link(["r0"])
    assert not list(Path("/dev/shm").glob(f"{PREFIX}*"))


@pytest.mark.parametrize(
    ("handover", "checksum", "owns"),
    [
        ("counters", "sampled", False),
        ("messages", "sampled", False),
        ("messages", "sampled", True),
        ("counters", "full", True),
        ("counters", "sampled", True),  # through the pipe
    ],
)
def test_shm_hands_over_by_counters_or_by_messages(handover: str, checksum: str, owns: bool) -> None:
    """Held groups larger than the memory, tensors in place, copied and spread, three rounds, and a death."""
    weights = {f"l.0.{name}_proj.w": torch.randn(2000) for name in ("gate", "up")}  # 16 000 of 16 384 bytes
    weights |= {"small": torch.ones(3), "exact": torch.randn(2048), "large": torch.randn(9000)}
    weights |= {f"l.1.{name}_proj.w": torch.randn(5000) for name in ("q", "k", "v")}
    weights |= {f"many.{index}": torch.full((3,), float(index)) for index in range(300)}
    own = {name: torch.zeros_like(tensor) for name, tensor in weights.items() if owns and name != "l.1.k_proj.w"}

    def body() -> None:
        engine = ShmCheckpointEngine(bucket_bytes=8192, timeout=2.0, handover=handover, checksum=checksum)
        engine.prepare()
        receiver, victim = Receiver(engine.invitation("r0"), own=own), Receiver(engine.invitation("dies"))
        for _ in range(3):
            weights["exact"] += 1
            receiver.sync()
            push(engine, ["r0"], weights)
            assert receiver.result() == {name: pack(tensor) for name, tensor in weights.items()}
        assert came_through_a_pipe(engine) == (owns and (handover, checksum) == ("counters", "sampled"))
        receiver.sync()
        victim.sync("receive")
        with pytest.raises(PeerError, match="dies"):
            push(engine, ["r0", "dies"], weights)
        engine.close()

    in_own_process(body)


def test_shm_goes_through_the_pipe_if_no_receiver_reads_in_place() -> None:
    def body() -> None:
        engine = ShmCheckpointEngine(bucket_bytes=1 << 20, timeout=2.0)
        engine.prepare()
        weights = {"a": torch.randn(70_000), "b": torch.randn(3)}
        owner = Receiver(engine.invitation("owner"), own={name: torch.zeros_like(one) for name, one in weights.items()})
        reader = Receiver(engine.invitation("reader"))
        receivers = {"owner": owner, "reader": reader}
        for members, piped in ((["owner", "reader"], False), (["owner"], True), (["reader", "owner"], False)):
            for member in members:
                receivers[member].sync()
            push(engine, members, weights)
            for member in members:
                assert receivers[member].result() == {name: pack(tensor) for name, tensor in weights.items()}
            assert came_through_a_pipe(engine) == piped  # another link for other members
        engine.close()

    in_own_process(body)


@pytest.mark.parametrize("owns", [False, True])
def test_shm_waits_as_long_as_it_may_also_after_a_long_export(owns: bool) -> None:
    """The timeout counts from when a side begins to wait, not from when it last saw the other one move."""
    weights = {name: torch.randn(20_000) for name in "abc"}

    def receive(pipe: Any) -> None:
        torch.set_num_threads(1)
        invitation = pipe.recv()
        engine = CheckpointEngineRegistry.new(invitation.engine, **invitation.settings)
        engine.join(invitation)
        got = {}
        own = {name: torch.zeros_like(tensor) for name, tensor in weights.items()} if owns else None
        for name, tensor in engine.receive_weights(own):
            got[name] = pack(tensor)
            if name == "b":
                time.sleep(1.7)  # longer than the receiver's patience, 3 times the timeout
        pipe.send(got)

    def body() -> None:
        engine = ShmCheckpointEngine(bucket_bytes=1 << 15, timeout=0.5)
        engine.prepare()
        receiver = Forked(receive)
        receiver.pipe.send(engine.invitation("r0"))

        def stream() -> Iterator[tuple[str, Tensor]]:
            time.sleep(0.7)
            os.kill(receiver.pid, signal.SIGSTOP)
            threading.Timer(0.1, os.kill, [receiver.pid, signal.SIGCONT]).start()
            yield "a", weights["a"]
            yield "b", weights["b"]
            time.sleep(1.9)
            yield "c", weights["c"]

        engine.init_process_group(engine.build_topology(trainer_world_size=1, receiver_ids=["r0"]))
        engine.send_weights(stream())
        assert receiver.result() == {name: pack(tensor) for name, tensor in weights.items()}
        engine.close()

    in_own_process(body)


@pytest.mark.parametrize("checksum", ["sampled", "full"])
def test_a_consumer_s_memory_is_let_go_after_a_sync(checksum: str) -> None:
    def body() -> None:
        engine = ShmCheckpointEngine(timeout=5.0, checksum=checksum)
        engine.prepare()

        own = torch.zeros(1000)
        receiver = CheckpointEngineRegistry.new("shm", **engine.invitation("r0").settings)
        joined = threading.Thread(target=lambda: push(engine, ["r0"], {"w": torch.ones(1000)}))
        joined.start()
        receiver.join(engine.invitation("r0"))
        assert sum(1 for _ in receiver.receive_weights({"w": own})) == 1
        receiver.finalize()
        joined.join(10)
        assert own.sum() == 1000
        gone = weakref.ref(own)
        del own
        gc.collect()
        assert gone() is None
        receiver.close()
        engine.close()

    in_own_process(body)


def test_shm_with_several_threads_copies_by_frames() -> None:
    engine, before = ShmCheckpointEngine(), torch.get_num_threads()
    engine._destinations = {"w": torch.zeros(2)}
    assert engine.readiness() == {"takes_pipe": True}
    engine._destinations = {"w": torch.zeros(2, device="meta")}
    assert engine.readiness() == {"takes_pipe": False}
    torch.set_num_threads(2)
    try:
        engine._destinations = {"w": torch.zeros(2)}
        assert engine.readiness() == {"takes_pipe": False}
    finally:
        torch.set_num_threads(before)


def test_shm_uses_counters_on_no_other_processor_than_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert ShmCheckpointEngine().handover == "messages"
    with pytest.raises(ValueError, match="on aarch64 use 'messages'"):
        ShmCheckpointEngine(handover="counters")
    with pytest.raises(ValueError, match="'counters', 'messages' or None"):
        ShmCheckpointEngine(handover="signals")


def test_shm_maps_no_file_elsewhere() -> None:
    with pytest.raises(ValueError, match="outside"):
        ShmCheckpointEngine().open_receiver_link({"name": "../../etc/passwd"})


# --- delta -----------------------------------------------------------------------------------------------------------


class Pair:
    """A sender's and a receiver's transform, joined without a link."""

    def __init__(self, dense_every: int = 100) -> None:
        self.sender, self.receiver = DeltaTransform(dense_every=dense_every), DeltaTransform(dense_every=dense_every)

    def sync(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        labels: list[str] = []

        def watched() -> Iterator[tuple[str, Tensor]]:
            for label, content in self.sender.encode(iter(tensors.items()), bases=[self.receiver.base]):
                labels.append(label)
                yield label, content

        got = {name: tensor.clone() for name, tensor in self.receiver.decode(watched())}
        self.sender.sent()
        self.receiver.received()
        return got, labels


def test_delta_sends_the_changed_elements_only() -> None:
    pair = Pair()
    weights = {"w": torch.randn(1000).bfloat16(), "same": torch.ones(50), "nan": torch.full((9,), float("nan"))}
    pair.sync(weights)
    assert pair.sender.payload_share > 1.0  # and the checksums
    weights["w"][[3, 500, 999]] += 1.0
    got, labels = pair.sync(weights)
    assert labels[1:] == ["at:w", "to:w", "sum:w", "sum:same", "sum:nan"]
    assert torch.equal(got["w"], weights["w"])
    assert pair.sender.payload_share == (3 * (4 + 2) + 3 * 8) / (2000 + 200 + 36)
    weights["same"] += 1.0  # 50 x (4 + 4) bytes would be more than 200
    assert "dense:same" in pair.sync(weights)[1]


def test_delta_is_dense_again_every_k_syncs_and_after_a_failure() -> None:
    pair = Pair(dense_every=3)
    weights = {"w": torch.zeros(100)}
    kinds = []
    for step in range(7):
        weights["w"][step] = 1.0
        kinds.append(pair.sync(weights)[1][1].split(":")[0])
    assert kinds == ["dense", "at", "at", "dense", "at", "at", "dense"]
    pair.receiver.forget()
    got, labels = pair.sync(weights)
    assert labels[1] == "dense:w"
    assert torch.equal(got["w"], weights["w"])


def test_d06_delta_rounds_matrices_before_it_compares_them_and_nothing_else() -> None:
    pair = Pair()
    pair.sender.dtype = torch.bfloat16
    bias = torch.tensor([1.0010, 1.0020])
    weights = {
        "w": torch.ones(40, 40),
        "mlp.gate.weight": torch.ones(2, 40),
        "mlp.gate.bias": bias,
        "id": torch.arange(4),
    }
    got, _ = pair.sync(weights)
    assert {name: tensor.dtype for name, tensor in got.items()} == {
        "w": torch.bfloat16,
        "mlp.gate.weight": torch.float32,
        "mlp.gate.bias": torch.float32,
        "id": torch.int64,
    }
    assert torch.equal(got["mlp.gate.bias"], bias)
    weights["w"] += 1e-4  # less than half of what bf16 resolves at 1
    weights["w"][3, :2] += 0.1
    weights["mlp.gate.weight"][0, 0] += 1e-4
    got, labels = pair.sync(weights)
    router = "mlp.gate.weight"
    changed = [f"{part}:{name}" for name in ("w", router) for part in ("at", "to", "sum")]
    assert labels[1:] == [*changed, "sum:mlp.gate.bias", "sum:id"]
    assert torch.equal(got["w"], weights["w"].bfloat16())
    assert pair.sender.payload_share == (2 * (4 + 2) + (4 + 4) + 4 * 8) / (3200 + 320 + 8 + 32)
    with pytest.raises(ValueError, match="'bfloat16', 'float16' or None"):
        DeltaCheckpointEngine(dtype="fp8")


def test_delta_notices_that_the_receiver_holds_something_else() -> None:
    pair = Pair()
    weights = {"w": torch.zeros(100)}
    pair.sync(weights)
    pair.receiver._held["w"][7] = 5.0
    weights["w"][3] = 1.0
    with pytest.raises(RuntimeError, match=r"w: checksum .* after the changes were put in"):
        pair.sync(weights)


@pytest.mark.parametrize("link", ["shm", "disk", "nccl"])
def test_delta_goes_over_any_link_and_to_a_newcomer_whole(link: str, tmp_path: Path) -> None:
    def body() -> None:
        folder = {"folder": str(tmp_path)} if link == "disk" else {}
        engine = DeltaCheckpointEngine(link=link, bucket_bytes=8192, timeout=2.0, **folder)
        engine.prepare()
        first, second = (Receiver(engine.invitation(name)) for name in ("a", "b"))
        weights = {"w": torch.randn(70, 70), "half": torch.randn(300).half()}
        shares = []
        for members in ({"a": first}, {"a": first}, {"a": first, "b": second}):
            weights["w"][5, :3] += 1.0
            for one in members.values():
                one.sync()
            push(engine, list(members), weights)
            shares.append(engine.payload_share)
            for one in members.values():
                assert one.result() == {name: pack(tensor) for name, tensor in weights.items()}
        assert shares[0] > 0.99
        assert shares[1] < 0.01
        assert shares[2] > 0.99
        engine.close()

    in_own_process(body)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_places_that_changed_are_the_same_word_by_word(dtype: torch.dtype) -> None:
    """For few and many changes, sizes that are no whole number of words, and tensors that begin within one."""
    draw = torch.Generator().manual_seed(0)
    for size in (0, 1, 7, 8, 4099):
        for first in (0, 1, 3):
            for share in (0.0, 0.003, 0.5):
                held = torch.randint(0, 100, (size + first,), generator=draw).to(dtype)[first:]
                new = held + (torch.rand(size, generator=draw) < share).to(dtype)
                if size:
                    new[-1] += 1
                expected = [place for place in range(size) if new[place] != held[place]]
                assert changed_places(new, held).tolist() == expected, (size, first, share)


def test_delta_needs_a_link_between_processes() -> None:
    with pytest.raises(ValueError, match="'naive' connects no processes"):
        DeltaCheckpointEngine(link="naive")


# --- disk ------------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_read_by_whoever_can_read_the_folder(tmp_path: Path) -> None:
    weights = {f"layer.{index}": torch.randn(30, 40) for index in range(5)}

    def body() -> None:
        engine = DiskCheckpointEngine(folder=str(tmp_path), bucket_bytes=10_000, timeout=2.0, keep=2)
        engine.prepare()
        receiver = Receiver(engine.invitation("r0"))
        for _ in range(3):
            receiver.sync()
            push(engine, ["r0"], weights)
            receiver.result()
        engine.close()

    in_own_process(body)
    assert len(snapshots(tmp_path)) == 2
    assert sorted(path.suffix for path in newest_snapshot(tmp_path).iterdir()) == [".json"] * 2 + [".safetensors"] * 3
    got = dict(read_snapshot(newest_snapshot(tmp_path)))
    assert list(got) == list(weights)
    assert all(torch.equal(got[name], tensor) for name, tensor in weights.items())


def test_a_snapshot_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "snapshot-00000001-x.part").mkdir()
    (tmp_path / "snapshot-00000001-x.part" / "manifest.json").write_text("{}")
    (tmp_path / "snapshot-00000000-x").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no complete snapshot"):
        newest_snapshot(tmp_path)


# --- libraries that are not there ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "module"), [("nixl", "nixl_cu12"), ("mooncake", "mooncake")])
def test_a_missing_library_is_named_with_its_extra(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [one for one in sys.modules if one.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"lightning_rlhf\[{name}\]"):
        CheckpointEngineRegistry.new(name)


# --- mooncake --------------------------------------------------------------------------------------------------------

MOONCAKE = """
    import os, sys, torch
    sys.path.insert(0, {tests!r})
    from support.receivers import Receiver, pack
    from lightning_rlhf.weights import MooncakeCheckpointEngine, PeerError
    engine = MooncakeCheckpointEngine(bucket_bytes=8192, timeout=5.0)
    engine.prepare()
    receiver, victim = Receiver(engine.invitation("r0")), Receiver(engine.invitation("dies"))
    weights = {{"large": torch.randn(5000), "half": torch.randn(300).bfloat16(), "empty": torch.zeros(0, 3)}}
    def push(names):
        engine.init_process_group(engine.build_topology(trainer_world_size=1, receiver_ids=names))
        engine.send_weights(iter(weights.items()))
        engine.finalize()
    for _ in range(3):
        weights["large"] += 1
        receiver.sync()
        push(["r0"])
        assert receiver.result() == {{name: pack(tensor) for name, tensor in weights.items()}}
    receiver.sync()
    victim.sync("receive")
    try:
        push(["r0", "dies"])
    except PeerError as error:
        assert error.peer == "dies", error
        print("all right")
    receiver.kill()
    sys.stdout.flush()
    os._exit(0)  # Mooncake's own threads take half a minute to end
"""


def test_mooncake_contents_three_rounds_and_a_death(tmp_path: Path) -> None:
    run_with_mooncake(MOONCAKE.format(tests=str(Path(__file__).parents[1])), tmp_path, timeout=100)
