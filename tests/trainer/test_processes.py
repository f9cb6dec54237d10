"""Lightning's own launcher: the ranks that a run starts end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.waiting import alive

SCRIPT = """
import sys, time
from pathlib import Path
import lightning.pytorch as pl
import torch
import lightning_rlhf as rl

class Waits(pl.LightningModule):
    def configure_model(self):
        Path(sys.argv[1], f"pid-{self.global_rank}").write_text(str(__import__("os").getpid()))
        time.sleep(120)

    def training_step(self, batch):
        return None

    def configure_optimizers(self):
        return None

if __name__ == "__main__":
    trainer = pl.Trainer(strategy="fsdp2_rl", devices=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Waits(), torch.utils.data.DataLoader([1, 2]))
"""


def test_a_killed_run_leaves_no_rank_behind(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    run = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while len(pids := sorted(tmp_path.glob("pid-*"))) < 2 or not all(path.read_text() for path in pids):
            assert run.poll() is None
            assert time.monotonic() < end, "the ranks did not start"
            time.sleep(0.2)
        other = int((tmp_path / "pid-1").read_text())
        assert int((tmp_path / "pid-0").read_text()) == run.pid
        assert alive(other)
        os.kill(run.pid, signal.SIGKILL)
        run.wait(10)
        end = time.monotonic() + 10
        while alive(other):
            assert time.monotonic() < end, "rank 1 outlived rank 0"
            time.sleep(0.1)
    finally:
        run.kill()
