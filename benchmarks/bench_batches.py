"""One mini-batch of long-tailed lengths, cut in three ways under one limit of tokens held at a time.

- padded: as a plain trainer does it, rows in the order they come, padded to the longest, as many as fit if any of them
  may meet;
- static: as many rows, packed, evened out by estimated compute (``micro_batch_size``);
- dynamic: by tokens, packed (``max_tokens_per_micro_batch``).

Timed is the forward and backward, in one thread. Each pair of two ways runs side by side, and which is first
alternates. Padding is that of the token stream; imbalance is the costliest micro-batch over the mean one, by estimated
FLOPs.

    python benchmarks/bench_batches.py --json > benchmarks/results/batches.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import CPU, experience, interleaved, loss, medians, ratios, smol_model, surroundings
from padded_policy import PaddedPolicy, padded_step

from lightning_rlhf.batching.balance import sequence_costs
from lightning_rlhf.batching.micro_batch import plan_micro_batches
from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.types import Experience

VOCABULARY = 2048
LAYERS = 2
PROMPT = 24


def long_tail(count: int, *, longest: int) -> list[int]:
    """Log-normal: most are short, a few come to the limit."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(1))
    return drawn.mul(0.9).add(4.2).exp().long().clamp(8, longest).tolist()


def _forward_backward(engine: BaseEngine, data: Experience) -> None:
    with engine.train_mode():
        engine.forward_backward_batch(data, loss)
        engine.zero_grad()


def _packed(data: Experience, **limit: int) -> Callable[[], Any]:
    optimizer = partial(torch.optim.AdamW, lr=1e-5)
    model = smol_model(layers=LAYERS, vocabulary=VOCABULARY)
    engine = TorchEngine(EngineConfig(model=model, optimizer=optimizer, **limit), device=CPU)
    engine.initialize()
    return partial(_forward_backward, engine, data)


def _facts(lengths: list[int], plan: list[list[int]], *, padded: bool) -> dict[str, Any]:
    tokens = [sum(lengths[row] for row in part) for part in plan]
    held = [len(part) * max(lengths[row] for row in part) for part in plan] if padded else tokens
    costs = [float(sequence_costs([lengths[row] for row in part], hidden_size=576).sum()) for part in plan]
    return {
        "micro_batches": len(plan),
        "most_tokens_held": max(held),
        "padding_share": round(1 - sum(lengths) / sum(held), 3),
        "imbalance": round(max(costs) / statistics.mean(costs), 2),
    }


def report(count: int, budget: int, pairs: int) -> dict[str, Any]:
    facts = surroundings()
    responses = long_tail(count, longest=budget // 2 - PROMPT)
    lengths = [PROMPT + length for length in responses]
    data = experience([PROMPT] * count, responses, vocabulary=VOCABULARY)
    by_count = max(budget // max(lengths), 1)
    in_order = [list(range(start, min(start + by_count, count))) for start in range(0, count, by_count)]
    plans = {
        "padded": in_order,
        "static": plan_micro_batches(lengths, micro_batch_size=by_count, hidden_size=576),
        "dynamic": plan_micro_batches(lengths, max_tokens=budget, hidden_size=576),
    }
    policy = PaddedPolicy(smol_model(layers=LAYERS, vocabulary=VOCABULARY))
    steps: dict[str, Callable[[], Any]] = {
        "padded": lambda: padded_step(policy, data, by_count),
        "static": _packed(data, micro_batch_size=by_count),
        "dynamic": _packed(data, max_tokens_per_micro_batch=budget),
    }
    rows = {name: _facts(lengths, plan, padded=name == "padded") for name, plan in plans.items()}
    speedups = {}
    for name in ("padded", "static"):
        slow, fast = interleaved(steps[name], steps["dynamic"], pairs=pairs)
        speedups[f"dynamic_over_{name}"] = ratios(slow, fast)
        for which, times in ((name, slow), ("dynamic", fast)):
            rows[which]["tokens_per_second"] = {
                clock: round(sum(lengths) / value) for clock, value in medians(times).items()
            }
    return {
        "benchmark": "batches",
        **facts,
        "load_average_after": round(os.getloadavg()[0], 1),
        "model": f"Llama, {LAYERS} layers with the widths of SmolLM2-135M, {VOCABULARY} tokens, tied, fp32",
        "lengths": {"rows": count, "mean": round(statistics.mean(lengths), 1), "longest": max(lengths)},
        "tokens_at_a_time": budget,
        "rows": rows,
        "tokens_per_second_ratio": speedups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Padded, static and dynamic micro-batches on long-tailed lengths.")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512, help="held at a time")
    parser.add_argument("--pairs", type=int, default=9, help="of each comparison")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = report(arguments.sequences, arguments.tokens, arguments.pairs)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['model']}; {found['machine']}; load average {found['load_average_before']}")
    print("micro-batches  number  tokens held  padding  imbalance  tokens/s of computing")
    for name, row in found["rows"].items():
        print(
            f"{name:<13s}  {row['micro_batches']:6d}  {row['most_tokens_held']:11d}  {row['padding_share']:7.1%}  "
            f"{row['imbalance']:9.2f}  {row['tokens_per_second']['computing']:8d}"
        )
    for name, ratio in found["tokens_per_second_ratio"].items():
        low, high = ratio["computing"]["interval"]
        print(f"{name}: {ratio['computing']['median']} times the tokens per second of computing ({low} to {high})")


if __name__ == "__main__":
    main()
