"""The benchmark of the checkpoint engines, as it is called."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_weight_sync.py"
ENGINES = ["naive", "shm", "nccl", *(["nixl"] if find_spec("nixl_cu12") else [])]


def run(*arguments: str, hidden: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs it at a tenth of a GB, where a package is hidden: one of its name in its way says that it is missing."""
    (folder / f"{hidden}.py").write_text(f"raise ModuleNotFoundError({f'No module named {hidden}'!r})")
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--gigabytes", "0.1", "--rounds", "1", "--json", *arguments],
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_one_line_of_json_with_each_engine_measured_and_each_missing_one_named(tmp_path: Path) -> None:
    done = run("--engines", ",".join([*ENGINES, "delta:nccl", "kimi"]), hidden="checkpoint_engine", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = done.stdout.splitlines()
    result = json.loads(line)
    assert list(result["engines"]) == [*ENGINES, "delta:nccl"]
    assert result["failed"] == {}
    assert "lightning_rlhf[kimi]" in result["skipped"]["kimi"]
    for row in result["engines"].values():
        for key in ("ratio_to_memcpy", "gb_per_s", "cpu_s_per_gb"):
            assert math.isfinite(row[key])
            assert row[key] > 0
        assert row["tensors"] > 20
        assert row["gb_per_s"] * row["seconds"] / row["gigabytes"] == pytest.approx(1, rel=0.05)
    # 1% of the elements changed, each sent as a place (4 bytes) and a value (2)
    assert 0.025 < result["engines"]["delta:nccl"]["payload_share"] < 0.035


def test_receivers_that_copy_tensors_from_where_they_arrive(tmp_path: Path) -> None:
    done = run("--engines", "shm", "--in-place", hidden="checkpoint_engine", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["in_place"] is True
    assert result["engines"]["shm"]["gb_per_s"] > 0


def test_an_engine_that_is_missing_alone_is_named_and_is_no_result(tmp_path: Path) -> None:
    done = run("--engines", "nixl", hidden="nixl_cu12", folder=tmp_path)
    assert done.returncode == 1
    assert "nixl: The nixl checkpoint engine needs NIXL: pip install 'lightning_rlhf[nixl]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["engines"] == {}
