"""What is left when the trainer of replicas is killed: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.tiny import write_tiny_model
from support.waiting import within

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

TRAINER = """
import os, sys, time
from lightning_rlhf.rollout.replica_process import ReplicaConfig
from lightning_rlhf.rollout.served import ServedRolloutEngine
from support.tiny import tiny_model

config = ReplicaConfig(
    model=sys.argv[1], max_model_len=64, kv_cache_bytes=1 << 24, num_threads=1, tensor_parallel_size=int(sys.argv[2])
)
engine = ServedRolloutEngine(sys.argv[1], max_model_len=64, fleet_configs=[config])
engine.load_weights(iter(tiny_model(tied=True).state_dict().items()))
holder = os.fork() if sys.argv[3] == "held" else 0
if holder or sys.argv[3] != "held":
    print(holder, engine._fleet._host.pid, engine._fleet.pids[0], engine._snapshots.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("workers", "pipes"), [(1, "closed"), (2, "held")])
def test_a_killed_trainer_leaves_no_process_and_no_weights_behind(tmp_path: Path, workers: int, pipes: str) -> None:
    """Not even while another child of the trainer, a data loader's worker say, holds the pipe to the host open."""
    model_path = write_tiny_model(tmp_path / "model", tied=True)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", TRAINER, str(model_path), str(workers), pipes]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    holder = 0
    try:
        assert trainer.stdout is not None
        *numbers, folder = trainer.stdout.readline().decode().split()
        holder, host, replica = map(int, numbers)
        theirs = [host, *group_members(replica)]
        assert len(theirs) >= 1 + workers
        assert list(Path(folder).glob("*/*.safetensors"))
        trainer.kill()
        trainer.wait(10)
        within(20, lambda: not any(running(pid) for pid in theirs))
        within(5, lambda: not Path(folder).exists())
        assert not holder or running(holder), "nothing held the pipe: this test shows nothing"
    finally:
        trainer.kill()
        trainer.wait(10)
        trainer.stdout.close()  # type: ignore[union-attr]
        if holder:
            os.kill(holder, signal.SIGKILL)


def group_members(group: int) -> list[int]:
    """Processes of a process group."""
    members = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getpgid(int(process.name)) == group:
                members.append(int(process.name))
    return members


def running(pid: int) -> bool:
    """Whether the process is there and no zombie, which an orphan's new parent may not have collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
