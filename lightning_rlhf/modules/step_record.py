"""What an RL step took and what callbacks found in it, kept until the step's metrics are handed out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import lightning.pytorch as pl
from typing_extensions import override

from lightning_rlhf.modules.metric_axis import show_by_rl_step


class StepRecord(pl.LightningModule):
    """A LightningModule that times the parts of an RL step and takes metrics from callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self._timings: dict[str, float] = {}
        self._timed_inside: list[float] = []
        self._noted: dict[str, float] = {}

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        show_by_rl_step(self.trainer.loggers)

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Adds a callback's metrics to those of the RL step under way; a later value of a name replaces an earlier."""
        self._noted.update(metrics)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the body's wall time to this RL step's ``time/<name>``, in seconds, without what is timed inside it."""
        start = time.perf_counter()
        self._timed_inside.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            own = elapsed - self._timed_inside.pop()
            self._timings[name] = self._timings.get(name, 0.0) + own
            if self._timed_inside:
                self._timed_inside[-1] += elapsed

    def take_record(self) -> tuple[dict[str, float], dict[str, float]]:
        """The metrics noted and the times as ``time/<name>``; both start anew."""
        record = dict(self._noted), {f"time/{name}": seconds for name, seconds in self._timings.items()}
        self._timings.clear()
        self._noted.clear()
        return record
