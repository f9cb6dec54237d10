"""What each checkpoint engine has of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.fork import in_own_process
from support.mooncake import run_with_mooncake
from support.receivers import Receiver, pack, push
from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights import (
    DeltaCheckpointEngine,
    DiskCheckpointEngine,
    NaiveCheckpointEngine,
)
from lightning_rlhf.weights.delta import DeltaTransform, changed_places
from lightning_rlhf.weights.disk import newest_snapshot, read_snapshot, snapshots

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
