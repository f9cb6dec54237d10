"""What the benchmarks of the engines have in common: the machine, times, medians, made-up batches."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

if TYPE_CHECKING:
    import lightning.pytorch as pl

CPU = torch.device("cpu")
MIB = 2**20
M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt: larger blocks are mapped, and go back to the system when freed."""


def seconds_of(work: Callable[[], Any]) -> tuple[float, float]:
    """By the clock, and of this process's computing: what else runs on the machine lengthens the first alone."""
    gc.collect()
    start, computed = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - computed


def median_interval(values: list[float], *, digits: int = 3) -> dict[str, Any]:
    """The median, and order statistics that enclose it with at least 95%: the extremes if there are too few.

    Distribution-free: of ``n`` values, as many as a fair coin says lie below the true median.
    """
    ordered, number = sorted(values), len(values)
    below, tail = 0, 0.5**number
    while below + 1 < number / 2 and tail + math.comb(number, below + 1) * 0.5**number <= 0.025:
        below += 1
        tail += math.comb(number, below) * 0.5**number
    interval = [round(ordered[below], digits), round(ordered[number - 1 - below], digits)]
    return {"median": round(statistics.median(ordered), digits), "interval": interval, "pairs": number}


def interleaved(
    first: Callable[[], Any], second: Callable[[], Any], *, pairs: int, before: Callable[[], Any] = lambda: None
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Times of both, side by side; which goes first alternates from pair to pair. One pair is run and thrown away.

    Args:
        first: what is timed.
        second: what it is compared with.
        pairs: that count.
        before: called before each, untimed.
    """
    times: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for pair in range(-1, pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            before()
            found = seconds_of((first, second)[which])
            if pair >= 0:
                times[which].append(found)
    return times


def ratios(numerator: list[tuple[float, float]], denominator: list[tuple[float, float]]) -> dict[str, Any]:
    """The median of the pairs' ratios, by the clock and by computing time."""
    pairs = list(zip(numerator, denominator, strict=True))
    return {
        name: median_interval([one[which] / other[which] for one, other in pairs])
        for which, name in enumerate(("clock", "computing"))
    }


def medians(times: list[tuple[float, float]]) -> dict[str, float]:
    """Seconds, by the clock and by computing time."""
    return {
        name: round(statistics.median(one[which] for one in times), 4)
        for which, name in enumerate(("clock", "computing"))
    }


def surroundings() -> dict[str, Any]:
    """What a result depends on besides the code."""
    return {
        "machine": f"{_cpu_name()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "threads": torch.get_num_threads(),
        "load_average_before": round(os.getloadavg()[0], 1),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def status_bytes(name: str) -> int:
    """A line of this process's status, such as ``VmHWM``, the peak of its resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; memory is measured on Linux only.")


def smol_model(*, layers: int, vocabulary: int) -> LlamaForCausalLM:
    """Random, with the sizes of SmolLM2-135M (which has 30 layers and 49,152 tokens), fp32."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).float()


def experience(
    prompts: list[int], responses: list[int], *, rollouts: int = 1, vocabulary: int = 1024, seed: int = 0
) -> Experience:
    """Rollouts whose response tokens all train.

    Args:
        prompts: tokens of each prompt.
        responses: tokens of each response, rollouts of the first prompt first.
        rollouts: of each prompt.
        vocabulary: number of tokens to draw from.
        seed: of tokens and advantages.
    """
    draw = torch.Generator().manual_seed(seed)
    pieces, masks, lengths = [], [], []
    for number, prompt_length in enumerate(prompts):
        prompt = torch.randint(0, vocabulary, (prompt_length,), generator=draw)
        for length in responses[number * rollouts : (number + 1) * rollouts]:
            pieces += [prompt, torch.randint(0, vocabulary, (length,), generator=draw)]
            masks += [torch.zeros(prompt_length, dtype=torch.bool), torch.ones(length, dtype=torch.bool)]
            lengths.append(prompt_length + length)
    mask = torch.cat(masks)
    return Experience(
        tokens=torch.cat(pieces),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        response_mask=mask,
        loss_mask=mask,
        rollout_log_probs=torch.zeros(len(mask)),
        advantages=torch.randn(len(mask), generator=draw) * mask,
        uids=[str(row // rollouts) for row in range(len(lengths))],
        sample_indices=[row % rollouts for row in range(len(lengths))],
        loss_weights=mask.float() / int(mask.sum()),
    )


def loss(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    """Plain policy gradient."""
    assert outputs.log_probs is not None
    return LossOutput(terms=-outputs.log_probs * micro_batch.advantages)


def quiet_trainer(folder: str | Path, callbacks: list[pl.Callback], **more: Any) -> pl.Trainer:
    """A Trainer of one process on the CPU that prints and keeps nothing.

    Args:
        folder: where it writes if it must.
        callbacks: its callbacks.
        **more: of ``Trainer``.
    """
    import lightning.pytorch as pl  # most benchmarks do without

    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **more,
    )


def print_rows(found: dict[str, Any], *, as_json: bool, heading: str, line: Callable[[dict[str, Any]], str]) -> None:
    """Prints what was found, as one JSON object or as a table of its ``rows``.

    Args:
        found: with ``model``, ``machine`` and ``rows``.
        as_json: prints the object.
        heading: over the table's columns.
        line: the table's line of a row.
    """
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['model']}; {found['machine']}")
    print(heading)
    for row in found["rows"]:
        print(line(row))
