"""Peak memory of a rank for one long sequence, over the ranks that share it.

One forward and backward of one sequence, all of whose tokens are scored, on the Ulysses engine. What counts is the peak
of a rank's resident memory over what it held before (parameters, libraries, buffers of the process group): activations,
gradients and what travels. Every run is in processes of its own; the largest rank is shown.

    python benchmarks/bench_sequence_parallel_memory.py --json > benchmarks/results/sequence_parallel_memory.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import print_rows
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.ulysses import UlyssesEngine
from lightning_rlhf.parity.processes import run_ranks
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CPU = torch.device("cpu")
AXES = ("dp_replicate", "dp_shard", "sp")
TOKENS = (4096, 8192, 16384)
SP_SIZES = (1, 2, 4)
MIB = 2**20
M_MMAP_THRESHOLD = -3


def model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=max(TOKENS),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).float()


def sequence(num_tokens: int) -> Experience:
    draw = torch.Generator().manual_seed(0)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[0] = False
    return Experience(
        tokens=torch.randint(0, 1024, (num_tokens,), generator=draw),
        cu_seqlens=torch.tensor([0, num_tokens]),
        response_mask=mask,
        loss_mask=mask,
        rollout_log_probs=torch.zeros(num_tokens),
        advantages=torch.randn(num_tokens, generator=draw) * mask,
        uids=["one"],
        sample_indices=[0],
        loss_weights=mask.float() / num_tokens,
    )


def loss(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    assert outputs.log_probs is not None
    return LossOutput(terms=-outputs.log_probs * micro_batch.advantages)


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; this benchmark reads a process's memory on Linux.")


def measure(num_tokens: int, sp_size: int, *, gradient_checkpointing: bool) -> dict[str, Any]:
    with TemporaryDirectory() as name:
        folder = Path(name)

        def work(rank: int) -> None:
            # Each tensor is mapped and unmapped by itself: else the allocator keeps what is freed, the more of it the
            # smaller the tensors are, and the peak of its pool is measured in place of the tensors'.
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
            engine = UlyssesEngine(
                EngineConfig(model=model(), optimizer=torch.optim.AdamW, gradient_checkpointing=gradient_checkpointing),
                device=CPU,
                mesh=init_device_mesh("cpu", (1, 1, sp_size), mesh_dim_names=AXES),
            )
            engine.initialize()
            with engine.train_mode():
                engine.forward_backward_batch(sequence(256), loss)  # what is made once
                engine.zero_grad()
                data = sequence(num_tokens)
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)
                before = status_bytes("VmRSS")
                Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
                start = time.perf_counter()
                metrics = engine.forward_backward_batch(data, loss)
                seconds = time.perf_counter() - start
            peak = (status_bytes("VmHWM") - before) / MIB
            found = {"peak_mib": peak, "seconds": seconds, "loss": float(metrics["loss"].value)}
            (folder / f"rank_{rank}.json").write_text(json.dumps(found))

        run_ranks(work, world_size=sp_size, device_type="cpu", folder=folder, timeout_seconds=600.0)
        ranks = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(sp_size)]
    return {
        "tokens": num_tokens,
        "sp": sp_size,
        "peak_mib": round(max(rank["peak_mib"] for rank in ranks), 1),
        "seconds": round(max(rank["seconds"] for rank in ranks), 2),
        "loss": ranks[0]["loss"],
    }


def report(tokens: list[int], *, gradient_checkpointing: bool) -> dict[str, Any]:
    rows = []
    for num_tokens in tokens:
        alone = None
        for sp_size in SP_SIZES:
            row = measure(num_tokens, sp_size, gradient_checkpointing=gradient_checkpointing)
            alone = alone or row
            rows.append({**row, "of_sp_1": round(row["peak_mib"] / alone["peak_mib"], 3)})
    return {
        "benchmark": "sequence_parallel_memory",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}",
        "model": "Qwen3, 2 layers, hidden 256, 8 heads, 4 key-value heads, vocabulary 1024, fp32",
        "gradient_checkpointing": gradient_checkpointing,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of a rank over the ranks that share a sequence.")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="lengths of the sequence")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute layers in the backward")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = report(arguments.tokens, gradient_checkpointing=arguments.gradient_checkpointing)
    print_rows(
        found,
        as_json=arguments.json,
        heading="tokens  sp  peak MiB of a rank  of sp 1  seconds",
        line=lambda row: (
            f"{row['tokens']:6d}  {row['sp']:2d}  {row['peak_mib']:18.1f}  {row['of_sp_1']:7.3f}  {row['seconds']:7.2f}"
        ),
    )


if __name__ == "__main__":
    main()
