"""What an engine costs and saves, each a ratio within one run.

- batches: one mini-batch of long-tailed lengths as a plain trainer pads it, in micro-batches by count, and by tokens,
  all under the same number of tokens at a time, in one thread's computing time. Padding is that of the token stream.
- logits: peak memory of log-probs and entropies with all logits at once and in chunks, in processes of their own.
- overhead: the fsdp2 engine against an FSDP2 loop written by hand, on the same model, rows and ranks; the order of each
  pair alternates. The interval of the median is the distribution-free one of at least 95%.
- export: all parameters, gathered one at a time, against a step of training.

    python benchmarks/bench_engine.py --json > benchmarks/results/engine.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from bench_sequence_parallel_memory import M_MMAP_THRESHOLD, MIB, status_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightning_rlhf.algorithms.log_probs import token_log_probs
from lightning_rlhf.batching.balance import sequence_costs
from lightning_rlhf.batching.micro_batch import plan_micro_batches
from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.engines.fsdp2 import FSDP2Engine
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.parity.processes import run_ranks
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CPU = torch.device("cpu")
VOCABULARY = 1024
HIDDEN = 256
ADAMW = partial(torch.optim.AdamW, lr=1e-5)
TOKEN_BUDGET = 1024
ROUNDS = 4
ROWS, ROW_LENGTH, ROWS_PER_MICRO_BATCH = 8, 96, 4
"""Of the overhead's mini-batch on one rank: equal lengths, so that padding plays no part."""
LOGITS_TOKENS, LOGITS_VOCABULARY, LOGITS_HIDDEN = 1024, 32768, 128


def model(layers: int = 4) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).float()


def experience(lengths: list[int], *, seed: int = 0) -> Experience:
    """Every token but each sequence's first one trains."""
    draw = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    num_tokens = int(cu_seqlens[-1])
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[cu_seqlens[:-1]] = False
    return Experience(
        tokens=torch.randint(0, VOCABULARY, (num_tokens,), generator=draw),
        cu_seqlens=cu_seqlens,
        response_mask=mask,
        loss_mask=mask,
        rollout_log_probs=torch.zeros(num_tokens),
        advantages=torch.randn(num_tokens, generator=draw) * mask,
        uids=[str(row) for row in range(len(lengths))],
        sample_indices=list(range(len(lengths))),
        loss_weights=mask.float() / int(mask.sum()),
    )


def loss(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    assert outputs.log_probs is not None
    return LossOutput(terms=-outputs.log_probs * micro_batch.advantages)


def seconds_of(work: Callable[[], Any]) -> tuple[float, float]:
    """By the clock, and of this process's computing: what else runs on the machine lengthens the first alone."""
    start, computed = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - computed


# --- batches ---------------------------------------------------------------------------------------------------------


def long_tail(count: int) -> list[int]:
    """Log-normal: most are short, a few come to the limit."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(1))
    return drawn.mul(0.9).add(4.2).exp().long().clamp(8, TOKEN_BUDGET // 2).tolist()


class PaddedPolicy(nn.Module):
    """Log-probs (and entropies, which only cost) of padded rows, as one would write it for a single training script."""

    def __init__(self, causal_lm: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, rows: Tensor, attention_mask: Tensor | None) -> Tensor:
        states = self.causal_lm.model(input_ids=rows, attention_mask=attention_mask, use_cache=False).last_hidden_state
        hidden, labels = states[:, :-1].flatten(0, 1), rows[:, 1:].flatten()
        log_probs, _ = token_log_probs(hidden, self.causal_lm.lm_head.weight, labels, entropy=True)
        return log_probs.view(len(rows), -1).clone()  # FSDP hangs its hook on a tensor, not on a view of one


def padded_step(policy: nn.Module, data: Experience, count: int) -> None:
    assert data.loss_weights is not None
    weights = -data.loss_weights * data.advantages
    sequences, terms = (list(values.split(data.lengths.tolist())) for values in (data.tokens, weights))
    for start in range(0, len(sequences), count):
        part = slice(start, start + count)
        rows = nn.utils.rnn.pad_sequence(sequences[part], batch_first=True)
        factors = nn.utils.rnn.pad_sequence(terms[part], batch_first=True)
        mask = torch.arange(rows.shape[1]) < torch.tensor([len(one) for one in sequences[part]])[:, None]
        (policy(rows, mask) * factors[:, 1:]).sum().backward()
    policy.zero_grad()


def batches(count: int) -> dict[str, Any]:
    lengths = long_tail(count)
    data = experience(lengths)
    # what fits in the budget if any of the sequences may come together
    by_count = max(TOKEN_BUDGET // max(lengths), 1)
    in_order = [list(range(start, min(start + by_count, count))) for start in range(0, count, by_count)]
    plans = {
        "static, padded": in_order,
        "static": plan_micro_batches(lengths, micro_batch_size=by_count, hidden_size=HIDDEN),
        "dynamic": plan_micro_batches(lengths, max_tokens=TOKEN_BUDGET, hidden_size=HIDDEN),
    }
    policy = PaddedPolicy(model())
    steps: dict[str, Callable[[], Any]] = {"static, padded": lambda: padded_step(policy, data, by_count)}
    for name, limit in (("static", {"micro_batch_size": by_count}), ("dynamic", {"max_tokens": TOKEN_BUDGET})):
        limits = {"max_tokens_per_micro_batch" if key == "max_tokens" else key: value for key, value in limit.items()}
        engine = TorchEngine(EngineConfig(model=model(), optimizer=ADAMW, **limits), device=CPU)
        engine.initialize()
        steps[name] = partial(_forward_backward, engine, data)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # what is made once
        step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(seconds_of(step)[1])
    rows = []
    for name, plan in plans.items():
        tokens = [sum(lengths[row] for row in part) for part in plan]
        held = sum(len(part) * max(lengths[row] for row in part) for part in plan)
        costs = [float(sequence_costs([lengths[row] for row in part], hidden_size=HIDDEN).sum()) for part in plan]
        rows.append(
            {
                "micro_batches": name,
                "number": len(plan),
                "most_tokens": max(tokens),
                "padding_share": round(1 - sum(lengths) / held, 3) if name == "static, padded" else 0.0,
                "imbalance": round(max(costs) / statistics.mean(costs), 2),
                "tokens_per_second": round(sum(lengths) / statistics.median(times[name])),
            }
        )
    return {
        "lengths": {"number": count, "mean": round(statistics.mean(lengths), 1), "longest": max(lengths)},
        "token_budget": TOKEN_BUDGET,
        "rows": rows,
        "dynamic_over_static": _speedup(times["static"], times["dynamic"]),
        "dynamic_over_static_padded": _speedup(times["static, padded"], times["dynamic"]),
    }


def _speedup(slow: list[float], fast: list[float]) -> dict[str, float]:
    """How many times the tokens per second, round by round."""
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    found = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 2) for name, value in found.items()}


def _forward_backward(engine: BaseEngine, data: Experience) -> None:
    with engine.train_mode():
        engine.forward_backward_batch(data, loss)
        engine.zero_grad()


# --- logits ----------------------------------------------------------------------------------------------------------


def all_logits(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    log_p = (hidden @ head.t()).log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def logits() -> dict[str, Any]:
    found: dict[str, float] = {}
    for name, score in (("naive", all_logits), ("chunked", partial(token_log_probs, entropy=True))):
        with TemporaryDirectory() as folder:
            work = partial(_peak_of_scores, score, Path(folder))
            run_ranks(work, world_size=1, device_type="cpu", folder=Path(folder), timeout_seconds=120.0)
            found[name] = json.loads((Path(folder) / "peak.json").read_text())
    return {
        "tokens": LOGITS_TOKENS,
        "vocabulary": LOGITS_VOCABULARY,
        "one_copy_of_all_logits_mib": LOGITS_TOKENS * LOGITS_VOCABULARY * 4 / MIB,
        "chunk": 512,
        "peak_mib": {name: round(value, 1) for name, value in found.items()},
        "chunked_over_naive": round(found["chunked"] / found["naive"], 3),
    }


def _peak_of_scores(score: Callable[..., tuple[Tensor, Tensor | None]], folder: Path, _rank: int) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)  # freed memory goes back at once
    torch.manual_seed(0)
    hidden = torch.randn(LOGITS_TOKENS, LOGITS_HIDDEN, requires_grad=True)
    head = torch.randn(LOGITS_VOCABULARY, LOGITS_HIDDEN, requires_grad=True)
    labels = torch.randint(0, LOGITS_VOCABULARY, (LOGITS_TOKENS,))
    gc.collect()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    log_probs, entropies = score(hidden, head, labels)
    assert entropies is not None
    (log_probs.sum() + entropies.sum()).backward()
    (folder / "peak.json").write_text(json.dumps((status_bytes("VmHWM") - before) / MIB))


# --- overhead and export ---------------------------------------------------------------------------------------------


class HandWritten:
    """FSDP2 without an engine: rows of one length, gradients summed over micro-batches and reduced once."""

    def __init__(self) -> None:
        policy = PaddedPolicy(model())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in policy.causal_lm.model.layers:
            fully_shard(layer, mesh=mesh)
        self.policy: FSDPModule = fully_shard(policy, mesh=mesh, reshard_after_forward=True)
        self.optimizer = ADAMW(policy.parameters())

    def step(self, data: Experience) -> float:
        assert data.loss_weights is not None
        policy: Any = self.policy
        tokens = data.tokens.view(-1, ROWS_PER_MICRO_BATCH, ROW_LENGTH)
        factors = (-data.loss_weights * data.advantages).view_as(tokens) * dist.get_world_size()  # FSDP2 averages
        total = torch.zeros(())
        for index in range(len(tokens)):
            policy.set_requires_gradient_sync(index == len(tokens) - 1)
            part = (policy(tokens[index], None) * factors[index, :, 1:]).sum()
            part.backward()
            total += part.detach()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        self.optimizer.step()
        policy.zero_grad()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


def median_interval(values: list[float]) -> dict[str, Any]:
    """The median, and order statistics that enclose it with at least 95%: the extremes if there are too few."""
    ordered, number = sorted(values), len(values)
    below, tail = 0, 0.5**number
    while below + 1 < number / 2 and tail + math.comb(number, below + 1) * 0.5**number <= 0.025:
        below += 1
        tail += math.comb(number, below) * 0.5**number
    interval = [round(ordered[below], 3), round(ordered[number - 1 - below], 3)]
    return {"median": round(statistics.median(ordered), 3), "interval": interval}


def overhead(pairs: int, ranks: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        work = partial(_pairs, pairs, Path(folder))
        run_ranks(work, world_size=ranks, device_type="cpu", folder=Path(folder), timeout_seconds=600.0)
        found: dict[str, Any] = json.loads((Path(folder) / "pairs.json").read_text())
    pairs_of_times = list(zip(found["engine"], found["hand"], strict=True))
    by_clock, by_computing = ([engine[which] / hand[which] for engine, hand in pairs_of_times] for which in (0, 1))
    step, export = (statistics.median(clock for clock, _ in found[name]) for name in ("engine", "export"))
    return {
        "overhead": {
            "ranks": ranks,
            "pairs": pairs,
            "tokens_per_step_and_rank": ROWS * ROW_LENGTH,
            "engine_over_hand_written": {
                "clock": median_interval(by_clock),
                "computing": median_interval(by_computing),
            },
            "engine_seconds": round(step, 3),
            "largest_difference_of_loss": found["difference"],
        },
        "export": {
            "mib": round(found["bytes"] / MIB, 1),
            "seconds": round(export, 4),
            "of_a_step": round(export / step, 3),
        },
    }


def _pairs(pairs: int, folder: Path, rank: int) -> None:
    hand = HandWritten()
    engine = FSDP2Engine(
        EngineConfig(model=model(), optimizer=ADAMW, micro_batch_size=ROWS_PER_MICRO_BATCH),
        device=CPU,
        mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",)),
    )
    engine.initialize()
    data = experience([ROW_LENGTH] * ROWS, seed=rank)
    data.loss_weights = data.loss_weights / dist.get_world_size() if data.loss_weights is not None else None
    losses: dict[str, float] = {}
    times: dict[str, list[tuple[float, float]]] = {"hand": [], "engine": [], "export": []}

    def run(name: str) -> None:
        losses[name] = hand.step(data) if name == "hand" else engine.train_batch(data, loss)["loss"]

    difference = 0.0
    for pair in range(-1, pairs):  # the first makes what is made once
        for name in ("hand", "engine") if pair % 2 else ("engine", "hand"):
            dist.barrier()
            times[name].append(seconds_of(partial(run, name)))
        difference = max(difference, abs(losses["hand"] - losses["engine"]))
    for _ in range(4):
        dist.barrier()
        times["export"].append(seconds_of(lambda: [value for _, value in engine.get_per_tensor_param()] and None))
    size = sum(value.nbytes for _, value in engine.get_per_tensor_param())
    if rank == 0:
        report = {name: values[1:] for name, values in times.items()}
        (folder / "pairs.json").write_text(json.dumps({**report, "difference": difference, "bytes": size}))


# --- report ----------------------------------------------------------------------------------------------------------


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def report(*, sequences: int, pairs: int, ranks: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    parts = {"batches": batches(sequences), "logits": logits(), **overhead(pairs, ranks)}
    return {
        "benchmark": "engine",
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}",
        "load_average": {"before": round(load, 1), "after": round(os.getloadavg()[0], 1)},
        "model": f"Qwen3, 4 layers, hidden {HIDDEN}, 8 heads, 4 key-value heads, vocabulary {VOCABULARY}, tied, fp32",
        **parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What an engine costs and saves.")
    parser.add_argument("--sequences", type=int, default=40, help="of the mini-batch with long-tailed lengths")
    parser.add_argument("--pairs", type=int, default=15, help="of steps: engine and hand-written loop")
    parser.add_argument("--ranks", type=int, default=2, help="of the overhead and the export")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = report(sequences=arguments.sequences, pairs=arguments.pairs, ranks=arguments.ranks)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['model']}; {found['machine']}; load average {found['load_average']['before']}")
    print("micro-batches     number  most tokens  padding  imbalance  tokens/s")
    for row in found["batches"]["rows"]:
        print(
            f"{row['micro_batches']:<16s}  {row['number']:6d}  {row['most_tokens']:11d}  {row['padding_share']:7.1%}  "
            f"{row['imbalance']:9.2f}  {row['tokens_per_second']:8d}"
        )
    for name in ("static", "static_padded"):
        speedup = found["batches"][f"dynamic_over_{name}"]
        print(f"dynamic over {name}: {speedup['median']} times the tokens/s ({speedup['least']} to {speedup['most']})")
    print(f"peak of log-probs and entropies, chunked over naive: {found['logits']['chunked_over_naive']}")
    for name, ratio in found["overhead"]["engine_over_hand_written"].items():
        low, high = ratio["interval"]
        print(f"engine over hand-written FSDP2, {name}: {ratio['median']} ({low} to {high})")
    print(
        f"export: {found['export']['seconds']} s for {found['export']['mib']} MiB, {found['export']['of_a_step']} steps"
    )


if __name__ == "__main__":
    main()
