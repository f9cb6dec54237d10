"""The manager over replicas in other processes: its order, its receipt, and failures in the middle."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fork import DistributedError, in_own_process, run_distributed
from support.pushes import Served, TinyRollout, TinyTrainer, new_manager, start
from support.receivers import Forked, came_through_a_pipe
from support.tiny import tiny_model, write_tiny_model
from torch import Tensor

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.rollout.hf import HFReferenceEngine
from lightning_rlhf.weights import CheckpointEngineManager, PeerError, ShmCheckpointEngine
from lightning_rlhf.weights.channel import join_hub
from lightning_rlhf.weights.replica import ReplicaHub, ReplicaServant, serve_replica
from lightning_rlhf.weights.roll_call import TrainerRankLostError


def test_the_protocol_in_its_order_on_two_replicas_in_two_pushes() -> None:
    def body() -> None:
        hub, served, replicas = start({"a": "", "b": ""})
        trainer = TinyTrainer()
        manager = new_manager(trainer, replicas, abort=True)
        receipt = manager.update_weights(7)
        assert (receipt.version, receipt.tensors_compared, receipt.probe_difference) == (7, 8, 0.0)
        assert [one.weight_version for one in replicas] == [7, 7]
        assert manager.ensure_fresh(7) is None
        trainer.weights["layer.0"] += 1.0
        assert manager.update_weights(8).unchanged is False
        hub.close()
        for one in served:
            events, weights = one.result()
            once = [
                "abort",
                "pause",
                "release",
                "wake weights",
                "load",
                "reset",
                "read",
                "wake kv_cache",
                "resume",
                "score",
            ]
            assert events == once * 2
            assert weights == {"layer.0": 2.0, "layer.1": 2.0, "layer.2": 3.0, "layer.3": 4.0}

    in_own_process(body)


@pytest.mark.parametrize("owns", [False, True])
@pytest.mark.parametrize(
    ("fault", "message", "versions"),
    [
        ("die", r"phase '(receive|load)', peer 'b': is gone", [None, None]),
        ("raise", r"peer 'b': the consumer gave up", [None, None]),
        ("pause", r"phase 'pause', peer 'b': RuntimeError: a request cannot be paused", [0, 0]),
    ],
)
def test_after_a_failure_a_replica_has_its_old_version_or_none(
    fault: str, message: str, versions: list[int | None], owns: bool
) -> None:
    def body() -> None:
        _, _, replicas = start({"a": "", "b": fault}, owns=owns)
        trainer = TinyTrainer()
        manager = new_manager(trainer, replicas)
        manager.update_weights(0)
        trainer.weights["layer.1"] += 1.0
        begun = time.monotonic()
        with pytest.raises(PeerError, match=message):
            manager.update_weights(1)
        assert time.monotonic() - begun < 8.0
        assert [one.weight_version for one in replicas] == versions
        manager.remove("b")  # the run may go on without it
        assert manager.update_weights(1).tensors_compared == 4
        assert replicas[0].weight_version == 1

    in_own_process(body)


@pytest.mark.parametrize("is_written", [False, True])
def test_weights_that_were_written_before_a_tensor_was_handed_over_are_not_the_old_ones(is_written: bool) -> None:
    class Carrier:
        def receive_weights(self, destinations: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
            assert len(list(destinations.values())) == len(list(destinations)) == 2  # to look at them changes nothing
            if is_written:
                destinations["b"].fill_(9.0)
            raise ConnectionError("the sender is gone")
            yield

        def finalize(self) -> None:
            pass

    rollout = TinyRollout(owns=True)
    rollout.weights = {"a": torch.zeros(1), "b": torch.zeros(1)}
    rollout.weight_version = 3
    servant: Any = ReplicaServant(rollout)
    servant._joined = lambda invitations: Carrier()
    servant.handle("pause", {"abort": False})
    with pytest.raises(ConnectionError):
        servant.handle("load", {"invitations": []})
    servant.handle("restore", {})
    assert rollout.weight_version == (None if is_written else 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_transformers_is_filled_by_the_push_itself(dtype: torch.dtype, tmp_path: Path) -> None:
    """Tied, in another process; with another dtype it is converted on the way."""

    def body() -> None:
        directory, hub = write_tiny_model(tmp_path), ReplicaHub()

        def serve(pipe: Any) -> None:
            rollout = HFReferenceEngine(directory, max_model_len=64, dtype=dtype)
            before = rollout._model.state_dict()
            serve_replica(rollout, address=hub.address, token=hub.token, replica_id="hf", timeout=10.0)
            after = rollout._model.state_dict()
            pipe.send([name for name in before if before[name].data_ptr() != after[name].data_ptr()])

        served = Forked(serve)
        config = EngineConfig(model=tiny_model(), optimizer=partial(torch.optim.AdamW, lr=1e-2))
        trainer = TorchEngine(config, device=torch.device("cpu"))
        trainer.initialize()
        manager = CheckpointEngineManager(
            engine=trainer,
            checkpoint_engine=ShmCheckpointEngine(bucket_bytes=1 << 20, timeout=10.0),
            replicas=hub.replicas(["hf"], timeout=60.0),
            probe_token_ids=[5, 9, 3, 20, 11, 40],
            probe_tolerance=1e-5 if dtype == torch.float32 else 0.1,
            timeout=20.0,
        )
        for version in range(3):
            receipt = manager.update_weights(version)
            assert receipt.tensors_compared == 8
            assert not receipt.unchanged
            with torch.no_grad():
                for parameter in trainer.module.parameters():
                    parameter.mul_(1.1)
        assert came_through_a_pipe(manager.checkpoint_engine)
        hub.close()
        assert served.result() == []

    in_own_process(body)


def test_d04_a_stale_tensor_in_another_process_is_named() -> None:
    def body() -> None:
        _, _, replicas = start({"a": "", "b": "stale layer.2"})
        trainer = TinyTrainer()
        manager = new_manager(trainer, replicas)
        manager.update_weights(0)
        trainer.weights["layer.2"] += 1.0
        with pytest.raises(RuntimeError, match=r"version 1: layer\.2 in the rollout engine \(b\) differs .* up to 1"):
            manager.update_weights(1)
        assert [one.weight_version for one in replicas] == [None, None]

    in_own_process(body)


def test_the_other_trainer_ranks_raise_too_and_hang_nowhere() -> None:
    def rank() -> str:
        trainer = TinyTrainer()
        if dist.get_rank() == 0:
            _, _, replicas = start({"a": "die"})
            manager = new_manager(trainer, replicas)
        else:
            manager = new_manager(trainer, [])
        manager.update_weights(0)
        with pytest.raises(RuntimeError) as caught:
            manager.update_weights(1)
        dist.barrier()  # the group is whole: all ranks have left the same collectives
        return str(caught.value)

    first, second = run_distributed(rank, 2, timeout=60.0)
    assert "peer 'a'" in first
    assert "failed on another rank" in second


def test_a_trainer_rank_that_dies_in_the_gather_ends_the_push_on_the_others() -> None:
    def rank() -> None:
        trainer = TinyTrainer()
        if dist.get_rank() == 0:
            _, _, replicas = start({"a": ""})
            manager = new_manager(trainer, replicas)
        else:
            replicas, manager = [], new_manager(trainer, [])
        manager.update_weights(0)
        if dist.get_rank() == 1:
            list(itertools.islice(trainer.get_per_tensor_param(), 2))  # takes part in half of the next push
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            manager.update_weights(1)
        finally:
            assert time.monotonic() - begun < 10.0
            assert [one.weight_version for one in replicas] == [None], "it samples with a mixture"

    with pytest.raises(DistributedError, match=r"TrainerRankLostError: .*another trainer rank is gone or silent"):
        run_distributed(rank, 2, timeout=60.0)


def test_a_trainer_rank_that_hangs_before_a_push_is_named_and_costs_no_replica_its_version() -> None:
    def rank() -> str:
        trainer, number = TinyTrainer(), dist.get_rank()
        _, _, replicas = start({"a": ""}) if number == 0 else (None, None, [])
        manager = new_manager(trainer, replicas, rank_timeout=3.0)
        manager.update_weights(0)
        if number == 1:
            time.sleep(6.0)
        begun = time.monotonic()
        with pytest.raises(TrainerRankLostError) as caught:
            manager.update_weights(1)
        assert time.monotonic() - begun < 7.0
        assert [one.weight_version for one in replicas] == [0] * len(replicas)
        return str(caught.value)

    first, _, third = run_distributed(rank, 3, timeout=60.0)
    assert "phase 'meet'" in first
    assert "rank 1 did not come" in first
    assert "rank 0" in third


def test_shared_memory_that_is_full_costs_no_replica_its_version() -> None:
    def body() -> None:
        hub, _, replicas = start({"a": ""})
        trainer = TinyTrainer()
        manager = new_manager(trainer, replicas)
        manager.update_weights(0)
        Served(hub, "late")
        manager.add(hub.replicas(["late"])[0])  # new receivers get new slots
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a /dev/shm with half the room would
        begun = time.monotonic()
        with pytest.raises(OSError, match=r"/dev/shm has no room for .* 8192 .* smaller bucket_bytes"):
            manager.update_weights(1)
        assert time.monotonic() - begun < 10.0
        assert [one.weight_version for one in replicas] == [0]
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        manager.update_weights(1)
        assert [one.weight_version for one in manager.replicas] == [1, 1]

    in_own_process(body)


def test_a_replica_joins_between_two_pushes() -> None:
    def body() -> None:
        hub, _, replicas = start({"a": ""})
        manager = new_manager(TinyTrainer(), replicas)
        manager.update_weights(0)
        late = Served(hub, "late")
        manager.add(hub.replicas(["late"])[0])
        assert manager.ensure_fresh(0) is not None
        assert [one.weight_version for one in manager.replicas] == [0, 0]
        with pytest.raises(ValueError, match="'late' already"):
            manager.add(manager.replicas[1])
        hub.close()
        assert late.result()[1]["layer.3"] == 4.0

    in_own_process(body)


def test_a_wrong_token_is_refused_and_the_hub_goes_on_listening() -> None:
    def body() -> None:
        hub = ReplicaHub()

        def stranger(pipe: Any) -> None:
            with pytest.raises(PeerError, match="refused: wrong token"):
                join_hub(hub.address, token="guess", receiver_id="a", timeout=5.0)
            pipe.send("refused")

        intruder = Forked(stranger)
        Served(hub, "a")
        assert hub.replicas(["a"], timeout=5.0)[0].replica_id == "a"
        assert intruder.result() == "refused"

    in_own_process(body)


def test_a_manager_needs_replicas_where_its_engine_sends_to() -> None:
    engine: Any = TinyTrainer()
    with pytest.raises(ValueError, match="carries weights to other processes: give replicas="):
        CheckpointEngineManager(
            engine=engine,
            checkpoint_engine=ShmCheckpointEngine(),
            rollout=TinyRollout(),
            probe_token_ids=[1, 2],
            probe_tolerance=1.0,
        )
