"""How long a program takes to import the product, and to its first RL step, beside the libraries it stands on.

Every measurement is a process of its own, from its start to its end, by the clock and by its computing time; the
programs take turns. The first step is one GRPO step of a tiny model with the Hugging Face sampler (what
``lightning-rlhf doctor`` tries): model, tokenizer, Trainer, sampling, update and weight push.

    python benchmarks/bench_startup.py --json > benchmarks/results/startup.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from measuring import surroundings

PLAIN = "import lightning, transformers, vllm"
NAMES = "import lightning_rlhf as rl; rl.GRPO; rl.PromptDataModule; rl.VLLMRollout; rl.WeightSync; rl.FSDP2RLStrategy"
PROGRAMS = {
    "plain": PLAIN,
    "import": "import lightning_rlhf",
    "public_names": NAMES,
    "public_names_and_vllm": f"{NAMES}; {PLAIN}",
    "first_step": "from lightning_rlhf.cli.doctor_tries import smoke_step; smoke_step()",
}


def run(program: str) -> tuple[float, float]:
    """Seconds by the clock, and of computing of the process and its children."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True)
    seconds, after = time.perf_counter() - start, os.times()
    computing = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, computing


def report(rounds: int) -> dict[str, Any]:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in PROGRAMS}
    for program in PROGRAMS.values():
        run(program)  # files into the page cache
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            times[name].append(run(program))
    rows = {}
    for name, found in times.items():
        of_plain = [mine[1] / plain[1] for mine, plain in zip(found, times["plain"], strict=True)]
        rows[name] = {
            "clock_seconds": round(statistics.median(one[0] for one in found), 2),
            "computing_seconds": round(statistics.median(one[1] for one in found), 2),
            "computing_of_plain": round(statistics.median(of_plain), 3),
            "computing_of_plain_range": [round(min(of_plain), 3), round(max(of_plain), 3)],
        }
    return {"benchmark": "startup", **surroundings(), "rounds": rounds, "plain": PLAIN, "programs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="Import and first step, beside plain imports of the libraries.")
    parser.add_argument("--rounds", type=int, default=3, help="of each program")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = report(arguments.rounds)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['machine']}; plain: {PLAIN}")
    print(f"{'program':22} {'clock s':>8} {'computing s':>12} {'of plain':>9}")
    for name, row in found["programs"].items():
        print(
            f"{name:22} {row['clock_seconds']:8.2f} {row['computing_seconds']:12.2f} {row['computing_of_plain']:9.3f}"
        )


if __name__ == "__main__":
    main()
