"""What holds a process's memory in an update, part by part, beside what ``lightning-rlhf plan`` says of each.

One process, the ``torch`` engine, a random model of SmolLM2's width in fp32. Parameters, gradients and optimizer state
are counted as tensors; activations are the peak of resident memory in a forward and backward over what was there,
less the gradients that it leaves. The rollout engine is vLLM in a process of its own: the resident memory that building
it and sampling add once vLLM is imported. Pages of the key-value cache that nothing has touched do not count in it.

    python benchmarks/bench_memory.py --rollout models/SmolLM2-135M-Instruct --json > benchmarks/results/memory.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import CPU, M_MMAP_THRESHOLD, MIB, experience, loss, smol_model, status_bytes, surroundings
from torch import Tensor

from lightning_rlhf.cli.estimate import Layout, training_memory
from lightning_rlhf.cli.estimate_rollout import rollout_memory
from lightning_rlhf.cli.model_shape import read_model_shape
from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.torch import TorchEngine

LAYERS, VOCABULARY = 6, 8192
PROMPT, RESPONSE, ROWS, CHUNK = 32, 224, 8, 512
LENGTH = PROMPT + RESPONSE
KV_CACHE_BYTES = 64 * MIB


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def update(*, checkpointing: bool) -> dict[str, dict[str, float]]:
    """Bytes of each part, measured and by the formula."""
    model = smol_model(layers=LAYERS, vocabulary=VOCABULARY)
    with TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        shape = read_model_shape(folder)
    config = EngineConfig(
        model=model, optimizer=partial(torch.optim.AdamW, lr=1e-6), gradient_checkpointing=checkpointing,
        logits_chunk_size=CHUNK,
    )  # fmt: skip
    engine = TorchEngine(config, device=CPU)
    engine.initialize()
    data = experience([PROMPT] * ROWS, [RESPONSE] * ROWS, vocabulary=VOCABULARY)
    engine.train_batch(data, loss)  # what is made once, the optimizer's state among it
    assert engine.optimizer is not None
    states = [value for state in engine.optimizer.state.values() for value in state.values() if value.ndim]
    with engine.train_mode():
        engine.zero_grad()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        engine.forward_backward_batch(data, loss)
        peak = status_bytes("VmHWM") - before
    gradients = size_of(p.grad for p in engine.module.parameters() if p.grad is not None)
    estimate = training_memory(
        shape, layout=Layout(), compute_bytes=4, state_bytes=8, tokens=ROWS * LENGTH, scored_tokens=ROWS * RESPONSE,
        chunk_size=CHUNK, accumulates=False, gradient_checkpointing=checkpointing, has_reference=False,
    )  # fmt: skip
    measured = {
        "parameters": size_of(engine.module.parameters()),
        "gradients": gradients,
        "optimizer_state": size_of(states),
        "activations_and_logits": peak - gradients,
    }
    estimate["activations_and_logits"] = estimate["activations"] + estimate["logits_chunk"]
    return {name: _beside(size, estimate[name]) for name, size in measured.items()}


def rollout(model: str) -> dict[str, dict[str, float]]:
    """What vLLM adds to this process's memory; its parts cannot be told apart from outside."""
    import vllm  # noqa: F401 - libraries are no part of an engine

    from lightning_rlhf.contracts.rollout import SamplingConfig
    from lightning_rlhf.rollout.vllm import VLLMEngine
    from lightning_rlhf.types import PromptBatch

    before = status_bytes("VmRSS")
    engine = VLLMEngine(model, max_model_len=512, max_num_seqs=64, kv_cache_bytes=KV_CACHE_BYTES)
    batch = PromptBatch(uids=["a"], prompt_token_ids=[[5, 6, 7]], prompts=[""], metadata=[{}])
    engine.weight_version = 0
    engine.generate(batch, SamplingConfig(n=64, max_new_tokens=64), rl_step=0)
    added = status_bytes("VmRSS") - before
    engine.shutdown()
    values = {"rollout.kv_cache_bytes": KV_CACHE_BYTES, "rollout.dtype": "float32"}
    parts = rollout_memory(
        values, read_model_shape(model), longest=512, side_by_side=64, compute_bytes=4, notes=[]
    )  # fmt: skip
    return {"weights_and_kv_cache": _beside(added, sum(parts.values()))}


def _beside(measured: int, estimate: int) -> dict[str, float]:
    return {
        "measured_mib": round(measured / MIB, 1),
        "plan_mib": round(estimate / MIB, 1),
        "measured_of_plan": round(measured / estimate, 3),
    }


PARTS = {
    "update": partial(update, checkpointing=False),
    "update, layers computed again": partial(update, checkpointing=True),
}


def child(part: str) -> None:
    # Each tensor is mapped and unmapped by itself: else the peak of the allocator's pool is measured.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    print(json.dumps(PARTS[part]() if part in PARTS else rollout(part)))


def report(model: str | None) -> dict[str, Any]:
    parts = {}
    for part in [*PARTS, *([model] if model else [])]:
        command = [sys.executable, "-W", "ignore", __file__, "--child", part]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        parts[part if part in PARTS else f"rollout engine, vLLM, {Path(part).name}"] = json.loads(
            done.stdout.splitlines()[-1]
        )
    sizes = f"{LAYERS} layers, vocabulary {VOCABULARY}, fp32, {ROWS} rows of {LENGTH} tokens, chunks of {CHUNK}"
    return {"benchmark": "memory", **surroundings(), "model": f"SmolLM2's width, {sizes}", "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory by what holds it, beside the plan's estimate.")
    parser.add_argument("--rollout", metavar="MODEL", help="directory of a model that vLLM loads as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--child", metavar="PART", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    found = report(arguments.rollout)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['model']}; {found['machine']}")
    for part, rows in found["parts"].items():
        print(part)
        for name, row in rows.items():
            measured, plan = row["measured_mib"], row["plan_mib"]
            print(f"  {name:24} {measured:9.1f} MiB, plan {plan:9.1f}, {row['measured_of_plan']:.3f}")


if __name__ == "__main__":
    main()
