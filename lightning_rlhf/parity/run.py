"""A parity run: one process, then the layout, then the comparison."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from transformers import AutoConfig

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.parity.batch import LENGTHS, make_batch
from lightning_rlhf.parity.compare import Comparison, compare
from lightning_rlhf.parity.layout import build_strategy, world_size
from lightning_rlhf.parity.measure import Measurement, measure
from lightning_rlhf.parity.processes import run_ranks
from lightning_rlhf.parity.tiny_models import TINY_MODELS, VOCAB_SIZE, tiny_model

TOLERANCE = 1e-5
"""Largest absolute difference in fp32."""
MICRO_BATCH_TOKENS = 48
"""Cuts the fixed batch into several micro-batches on one rank and into one on another."""
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """What a parity run found.

    Attributes:
        strategy: name of the strategy.
        layout: its axes and their sizes.
        comparison: every difference.
        tolerance: largest difference allowed.
        device_type: where it ran.
        seconds: of the whole run.
    """

    strategy: str
    layout: Mapping[str, int]
    comparison: Comparison
    tolerance: float
    device_type: str
    seconds: float

    @property
    def first_divergence(self) -> str | None:
        """What differs first, None if all is within the tolerance."""
        return self.comparison.first_divergence(self.tolerance)

    def as_json(self) -> dict[str, object]:
        """The keys ``strategy``, ``layout``, ``max_abs_diff``, ``first_divergence`` and ``seconds``.

        A difference is null where something is missing or not a number: JSON has no infinity.
        """
        largest = self.comparison.largest()
        return {
            "strategy": self.strategy,
            "layout": ",".join(f"{axis}={size}" for axis, size in self.layout.items()),
            "max_abs_diff": {name: value if math.isfinite(value) else None for name, value in largest.items()},
            "first_divergence": self.first_divergence,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One side's work, called with its rank in each process."""

    job: Measurement
    device_type: str
    strategy: str | None = None
    layout: Mapping[str, int] | None = None
    options: Mapping[str, Any] | None = None

    def __call__(self, rank: int) -> None:
        logging.getLogger("lightning").setLevel(logging.WARNING)
        if self.strategy is None or self.layout is None:
            measure(self._one_process, self.job, reference=True)
            return
        strategy = build_strategy(self.strategy, self.layout, options=self.options, timeout_seconds=TIMEOUT_SECONDS)
        accelerator: Accelerator = CUDAAccelerator() if self.device_type == "cuda" else CPUAccelerator()
        strategy.accelerator = accelerator
        strategy.parallel_devices = [
            torch.device("cuda", index) if self.device_type == "cuda" else torch.device("cpu")
            for index in range(world_size(self.strategy, self.layout))
        ]
        strategy.cluster_environment = TorchElasticEnvironment()  # reads what the launcher has set
        strategy.setup_environment()
        measure(partial(strategy.create_engine, "language_model"), self.job, reference=False)

    def _one_process(self, config: EngineConfig) -> BaseEngine:
        device = torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")
        engine = TorchEngine(config, device=device)
        engine.initialize()
        return engine


def run_parity(
    *,
    strategy: str,
    layout: Mapping[str, int],
    model: str = "tiny-qwen3",
    options: Mapping[str, Any] | None = None,
    micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    tolerance: float = TOLERANCE,
) -> ParityReport:
    """Trains the fixed batch through the layout and through one process, and compares them.

    The layout's micro-batches are cut by tokens, the one process has all rows in one; each loads or builds the model
    for itself. Without a GPU for each rank both run on the CPU.

    Args:
        strategy: name of an RL strategy.
        layout: axis to size.
        model: one of ``TINY_MODELS``, or a directory or id of a causal language model.
        options: further arguments of the strategy, by name.
        micro_batch_tokens: limit of the layout's micro-batches.
        tolerance: largest difference allowed.

    Raises:
        ValueError: for a strategy, a layout, a model or a limit that cannot be run.
        RankError: if a process fails.
    """
    start = time.perf_counter()
    if micro_batch_tokens < max(LENGTHS):
        raise ValueError(
            f"--micro-batch-tokens: {micro_batch_tokens} is below {max(LENGTHS)}, the longest sequence of the batch."
        )
    build_strategy(strategy, layout, options=options)  # names what is wrong before anything is started
    tiny = model in TINY_MODELS
    size = world_size(strategy, layout)
    device_type = "cuda" if torch.cuda.device_count() >= size else "cpu"
    batch = make_batch(VOCAB_SIZE if tiny else _vocab_size(model))
    with tempfile.TemporaryDirectory(prefix="lightning_rlhf_parity_") as name:
        folders = {side: Path(name) / side for side in ("one", "one/ranks", "layout", "layout/ranks")}
        for folder in folders.values():
            folder.mkdir()
        job = Measurement(
            make_model=partial(tiny_model, model) if tiny else partial(str, model),
            batch=batch,
            micro_batch_tokens=None,
            policies=folders["one"] / "policies.safetensors",
            out=folders["one"],
            disk_names=strategy == "megatron_rl",
        )
        layout_job = Measurement(
            make_model=job.make_model,
            batch=batch,
            micro_batch_tokens=micro_batch_tokens,
            policies=job.policies,
            out=folders["layout"],
        )
        for side, count, work in (
            ("one", 1, _Work(job=job, device_type=device_type)),
            (
                "layout",
                size,
                _Work(job=layout_job, device_type=device_type, strategy=strategy, layout=dict(layout), options=options),
            ),
        ):
            run_ranks(
                work,
                world_size=count,
                device_type=device_type,
                folder=folders[f"{side}/ranks"],
                timeout_seconds=TIMEOUT_SECONDS,
                num_threads=1 if tiny else max(1, (os.cpu_count() or 1) // count),
            )
        comparison = compare(folders["one"], folders["layout"], batch=batch, world_size=size)
    return ParityReport(
        strategy=strategy,
        layout=dict(layout),
        comparison=comparison,
        tolerance=tolerance,
        device_type=device_type,
        seconds=time.perf_counter() - start,
    )


def _vocab_size(model: str) -> int:
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model: {model} is neither one of {', '.join(TINY_MODELS)} nor a model that can be read: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return int(config.get_text_config().vocab_size)
