"""Peak memory of log-probs and entropies, forward and backward: all logits at once, and a chunk at a time.

Each way runs in a process of its own; what counts is the peak of resident memory over what it held before.

    python benchmarks/bench_logits.py --json > benchmarks/results/logits.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import M_MMAP_THRESHOLD, MIB, status_bytes, surroundings
from torch import Tensor

from lightning_rlhf.algorithms.log_probs import token_log_probs
from lightning_rlhf.parity.processes import run_ranks

HIDDEN = 576
CHUNKS = (128, 512)


def all_logits(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    log_p = (hidden @ head.t()).log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def peak_mib(score: Callable[..., tuple[Tensor, Tensor | None]], tokens: int, vocabulary: int) -> float:
    with TemporaryDirectory() as folder:
        work = partial(_measure, score, tokens, vocabulary, Path(folder))
        run_ranks(work, world_size=1, device_type="cpu", folder=Path(folder), timeout_seconds=300.0)
        return float(json.loads((Path(folder) / "peak.json").read_text()))


def _measure(
    score: Callable[..., tuple[Tensor, Tensor | None]], tokens: int, vocabulary: int, folder: Path, _rank: int
) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)  # freed memory goes back at once
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    head = torch.randn(vocabulary, HIDDEN, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    gc.collect()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    log_probs, entropies = score(hidden, head, labels)
    assert entropies is not None
    (log_probs.sum() + entropies.sum()).backward()
    (folder / "peak.json").write_text(json.dumps((status_bytes("VmHWM") - before) / MIB))


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of log-probs with all logits and in chunks.")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    tokens, vocabulary = arguments.tokens, arguments.vocabulary
    facts = surroundings()
    naive = peak_mib(all_logits, tokens, vocabulary)
    chunked = {
        chunk: peak_mib(partial(token_log_probs, entropy=True, chunk_size=chunk), tokens, vocabulary)
        for chunk in CHUNKS
    }
    found: dict[str, Any] = {
        "benchmark": "logits",
        **facts,
        "load_average_after": round(os.getloadavg()[0], 1),
        "tokens": tokens,
        "vocabulary": vocabulary,
        "hidden_size": HIDDEN,
        "dtype": "fp32",
        "one_copy_of_all_logits_mib": round(tokens * vocabulary * 4 / MIB, 1),
        "peak_mib": {"naive": round(naive, 1), **{f"chunks of {n}": round(peak, 1) for n, peak in chunked.items()}},
        "over_naive": {f"chunks of {n}": round(peak / naive, 3) for n, peak in chunked.items()},
    }
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for name, peak in found["peak_mib"].items():
        print(f"{name}: {peak} MiB, {peak / naive:.1%} of naive")


if __name__ == "__main__":
    main()
