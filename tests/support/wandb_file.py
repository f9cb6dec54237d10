"""Reads what an offline W&B run wrote: the file's records, which are a LevelDB log of protocol buffers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
FIRST_HEADER = 7
"""``:W&B``, a magic number, a version; once, at the start."""


def records(file: Path, *, patience: float = 20.0) -> list[Any]:
    """Every record of a run that has ended, as ``wandb_internal_pb2.Record``.

    Args:
        file: ``run-ID.wandb``.
        patience: seconds to wait for W&B's own process, which may write on after the run's.
    """
    end = time.monotonic() + patience
    while True:
        found = _read(file)
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        assert time.monotonic() < end, f"{file} has no end; {len(found)} records"
        time.sleep(0.2)


def _read(file: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for payload in _payloads(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        found.append(record)
    return found


def _payloads(data: bytes) -> list[bytes]:
    assert data[:4] == b":W&B", data[:8]
    place, parts, found = FIRST_HEADER, b"", []
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]  # 1 whole, 2 first, 3 middle, 4 last
        if kind == 0:
            break
        parts += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):
            found.append(parts)
            parts = b""
    return found


def history(file: Path) -> list[dict[str, Any]]:
    """What each call of ``log`` gave, in order."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


def config(file: Path) -> dict[str, Any]:
    """The run's configuration, by dotted key."""
    found: dict[str, Any] = {}
    for record in records(file):
        parts = (
            [record.run.config] if record.WhichOneof("record_type") == "run"
            else [record.config] if record.WhichOneof("record_type") == "config" else []
        )  # fmt: skip
        for part in parts:
            for item in part.update:
                found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return found


def axes(file: Path) -> dict[str, str]:
    """Metric or glob to its x-axis, the last definition of each."""
    return {
        record.metric.glob_name or record.metric.name: record.metric.step_metric
        for record in records(file)
        if record.WhichOneof("record_type") == "metric"
    }
