"""SIGTERM, as a scheduler sends it, and Ctrl-C: all ranks end after the RL step they are in, with its checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.waiting import alive

SCRIPT = """
import os, sys, time
from functools import partial
from pathlib import Path
import lightning.pytorch as pl
import torch
import lightning_rlhf as rl
from lightning_rlhf.data import ListPrompts

FOLDER, MODEL = Path(sys.argv[1]), sys.argv[2]

def reward(prompts, responses, metadata):
    rank = int(os.environ.get("LOCAL_RANK", 0))
    FOLDER.joinpath(f"in-step-{rank}.tmp").write_text(str(os.getpid()))
    FOLDER.joinpath(f"in-step-{rank}.tmp").rename(FOLDER / f"in-step-{rank}")
    time.sleep(1.0 + 2.0 * rank)  # while rank 0 waits for the other in a collective
    return [float(len(response)) for response in responses]

if __name__ == "__main__":
    torch.set_num_threads(1)
    rollout = rl.HFRollout(num_rollouts=2, max_new_tokens=4)
    trainer = pl.Trainer(
        strategy="fsdp2_rl", devices=2, accelerator="cpu", logger=False, max_epochs=1000, default_root_dir=FOLDER,
        callbacks=[rollout, rl.WeightSync(), rl.RLCheckpoint(every_n_rl_steps=1)],
        enable_progress_bar=False,
    )
    module = rl.GRPO(model=MODEL, reward=reward, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    trainer.fit(module, rl.PromptDataModule(ListPrompts(["1 + 1 =", "2 + 2 ="]), prompts_per_step=2))
"""


def _wait_for(*paths: Path, run: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert run.poll() is None, run.communicate()[1][-2000:]
        assert time.monotonic() < end, "the ranks did not come to a step"
        time.sleep(0.05)


def _start(folder: Path, model: Path) -> subprocess.Popen[str]:
    script = folder / "run.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, folder, model]
    # a session of its own: what a terminal sends to its foreground group reaches these processes and no others
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # tests that run in the background of a shell have been told to ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _send(run: subprocess.Popen[str], pids: list[int], number: signal.Signals, *, told: int | None) -> None:
    """To one rank, or for None to all of the group, as a terminal does."""
    if told is None:
        os.killpg(run.pid, number)
    else:
        os.kill(pids[told], number)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGTERM, 1),
        (signal.SIGINT, None),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow),
    ],
)
def test_ranks_end_together_with_the_step(
    tmp_path: Path, tiny_directory: Path, number: signal.Signals, told: int | None
) -> None:
    run = _start(tmp_path, tiny_directory)
    try:
        marks = [tmp_path / f"in-step-{rank}" for rank in range(2)]
        _wait_for(*marks, run=run)
        pids = [int(mark.read_text()) for mark in marks]
        time.sleep(1.5)  # rank 0 has come to the collective, rank 1 sleeps
        _send(run, pids, number, told=told)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode in (0, 128 + signal.SIGTERM), errors[-2000:]
    assert ("Interrupted: all ranks end after the RL step" in errors) == (number == signal.SIGINT)
    end = time.monotonic() + 10
    while alive(pids[1]):
        assert time.monotonic() < end, "rank 1 goes on"
        time.sleep(0.1)
    assert [path.name for path in tmp_path.rglob("rl_step=*.ckpt")] == ["rl_step=000001.ckpt"]


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path: Path, tiny_directory: Path) -> None:
    run = _start(tmp_path, tiny_directory)
    try:
        marks = [tmp_path / f"in-step-{rank}" for rank in range(2)]
        _wait_for(*marks, run=run)
        pids = [int(mark.read_text()) for mark in marks]
        for _ in range(2):
            time.sleep(0.3)
            os.killpg(run.pid, signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode not in (0, 128 + signal.SIGTERM), errors[-2000:]
    end = time.monotonic() + 10
    while alive(pids[1]):
        assert time.monotonic() < end, "rank 1 goes on"
        time.sleep(0.1)
    assert not list(tmp_path.rglob("rl_step=*.ckpt"))
