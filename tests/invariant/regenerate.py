"""Writes the committed trajectories anew: ``PYTHONPATH=tests python tests/invariant/regenerate.py``.

Do so when a change is meant to alter the numbers, and say in the commit why they move.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from support.trajectory import MODULES, write_trajectory

if __name__ == "__main__":
    torch.set_num_threads(1)
    for algorithm in MODULES:
        with TemporaryDirectory() as root:
            print(write_trajectory(algorithm, Path(root)))
