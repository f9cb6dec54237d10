"""The fsdp2 engine against an FSDP2 loop written by hand, and what export and offload take beside a step.

Both train the same model on the same rows on the same ranks, all rows of one length so that padding plays no part: two
micro-batches, gradients reduced once, clipped, AdamW. Steps come in pairs, side by side, and which is first alternates.
The hand-written loop has what the engine's step has (entropies, the global loss, the norm) and no more.

    python benchmarks/bench_overhead.py --json > benchmarks/results/overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from measuring import CPU, MIB, experience, interleaved, loss, medians, ratios, seconds_of, smol_model, surroundings
from padded_policy import PaddedPolicy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaForCausalLM

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.fsdp2 import FSDP2Engine
from lightning_rlhf.parity.processes import run_ranks
from lightning_rlhf.types import Experience

VOCABULARY = 4096
ADAMW = partial(torch.optim.AdamW, lr=1e-5)
ROWS, PROMPT, RESPONSE, ROWS_PER_MICRO_BATCH = 8, 16, 48, 4
LENGTH = PROMPT + RESPONSE
REPEATS = 5


class HandWritten:
    """FSDP2 without an engine."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        policy = PaddedPolicy(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in policy.causal_lm.model.layers:
            fully_shard(layer, mesh=mesh)
        self.policy: FSDPModule = fully_shard(policy, mesh=mesh, reshard_after_forward=True)
        self.optimizer = ADAMW(policy.parameters())

    def step(self, data: Experience) -> float:
        assert data.loss_weights is not None
        policy: Any = self.policy
        tokens = data.tokens.view(-1, ROWS_PER_MICRO_BATCH, LENGTH)
        factors = (-data.loss_weights * data.advantages).view_as(tokens) * dist.get_world_size()  # FSDP2 averages
        scored = data.response_mask.view_as(tokens)
        total = torch.zeros(())
        for index in range(len(tokens)):
            policy.set_requires_gradient_sync(index == len(tokens) - 1)
            part = (policy(tokens[index], None, scored[index, :, 1:]) * factors[index, :, 1:]).sum()
            part.backward()
            total += part.detach()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        self.optimizer.step()
        policy.zero_grad()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


def _measure(layers: int, pairs: int, folder: Path, rank: int) -> None:
    hand = HandWritten(smol_model(layers=layers, vocabulary=VOCABULARY))
    model = smol_model(layers=layers, vocabulary=VOCABULARY)
    engine = FSDP2Engine(
        EngineConfig(model=model, optimizer=ADAMW, micro_batch_size=ROWS_PER_MICRO_BATCH),
        device=CPU,
        mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",)),
    )
    engine.initialize()
    data = experience([PROMPT] * ROWS, [RESPONSE] * ROWS, vocabulary=VOCABULARY, seed=rank)
    assert data.loss_weights is not None
    data.loss_weights = data.loss_weights / dist.get_world_size()
    losses: dict[str, list[float]] = {"engine": [], "hand": []}
    by_engine, by_hand = interleaved(
        lambda: losses["engine"].append(engine.train_batch(data, loss)["loss"]),
        lambda: losses["hand"].append(hand.step(data)),
        pairs=pairs,
        before=dist.barrier,
    )
    export, offload = [], []
    for _ in range(REPEATS + 1):
        dist.barrier()
        export.append(seconds_of(lambda: [value for _, value in engine.get_per_tensor_param()] and None))
        offload.append(seconds_of(partial(_offload_and_back, engine)))
    size = sum(value.nbytes for _, value in engine.get_per_tensor_param())
    if rank == 0:
        differences = [abs(one - other) for one, other in zip(losses["engine"], losses["hand"], strict=True)]
        found = {
            "engine": by_engine,
            "hand": by_hand,
            "export": export[1:],
            "offload": offload[1:],
            "difference": max(differences),
            "bytes": size,
        }
        (folder / "found.json").write_text(json.dumps(found))


def _offload_and_back(engine: FSDP2Engine) -> None:
    """To the host and back; on a machine without an accelerator nothing has to be copied."""
    engine.to(CPU)
    engine.to(engine.device)


def report(layers: int, pairs: int, ranks: int) -> dict[str, Any]:
    facts = surroundings()
    with TemporaryDirectory() as folder:
        work = partial(_measure, layers, pairs, Path(folder))
        run_ranks(work, world_size=ranks, device_type="cpu", folder=Path(folder), timeout_seconds=1800.0)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    step, export = medians(found["engine"]), medians(found["export"])
    return {
        "benchmark": "overhead",
        **facts,
        "load_average_after": round(os.getloadavg()[0], 1),
        "model": f"Llama, {layers} layers with the widths of SmolLM2-135M, {VOCABULARY} tokens, tied, fp32",
        "ranks": ranks,
        "tokens_per_step_and_rank": ROWS * LENGTH,
        "engine_over_hand_written": ratios(found["engine"], found["hand"]),
        "engine_seconds": step,
        "hand_written_seconds": medians(found["hand"]),
        "largest_difference_of_loss": found["difference"],
        "export": {
            "mib": round(found["bytes"] / MIB, 1),
            "seconds": export,
            "of_a_step": round(export["computing"] / step["computing"], 3),
        },
        "offload_and_back_without_an_accelerator": medians(found["offload"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The fsdp2 engine against a loop written by hand.")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = report(arguments.layers, arguments.pairs, arguments.ranks)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['model']}; {found['machine']}; load average {found['load_average_before']}")
    for name, ratio in found["engine_over_hand_written"].items():
        low, high = ratio["interval"]
        print(f"engine over hand-written FSDP2, {name}: {ratio['median']} ({low} to {high}), {ratio['pairs']} pairs")
    export = found["export"]
    print(f"export: {export['seconds']['clock']} s for {export['mib']} MiB, {export['of_a_step']} of a step")


if __name__ == "__main__":
    main()
