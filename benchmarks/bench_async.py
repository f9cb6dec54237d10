"""Asynchronous against synchronous RL on SmolLM2-135M-Instruct: one trainer process and one rollout replica.

Both sides: the same prompts in the same order (one-digit sums of reasoning-gym), verifier, optimizer and truncated
importance weights; one CPU thread for the trainer and one for the replica; bf16 compute and sampling, fp32 weights. The
synchronous side waits for its responses, then trains; the asynchronous one samples the next step's responses while it
trains (``max_staleness``), and a push finds them in flight (``in_flight="keep"``). Sides take turns, each a fresh run.

Printed: seconds of an RL step, from the end of one to the end of the next, and their ratio; the same for a token, since
two policies that learn do not answer at the same length; what the ratio could be at most, if the shorter of sampling
and the rest were hidden wholly; both reward curves (an asynchronous step's responses
are of an older policy, so that its curve lags by as much); what both policies answer at the end to questions that
neither was trained on; the share of tokens by staleness. The first steps of a run, which load, compile and fill, are
left out of the times.

    python benchmarks/bench_async.py --json > benchmarks/results/async.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from measuring import quiet_trainer, surroundings

from lightning_rlhf.callbacks import VLLMRollout, WeightSync
from lightning_rlhf.contracts.callback import RLCallback
from lightning_rlhf.data import PromptDataModule, ReasoningGymPrompts
from lightning_rlhf.modules import GRPO, OnPolicyModule
from lightning_rlhf.rewards import ReasoningGymReward
from lightning_rlhf.strategies import FSDP2RLStrategy
from lightning_rlhf.types import PromptBatch

ONE_DIGIT_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
WARM_UP_STEPS = 2
HELD_OUT = 128


class Steps(RLCallback):
    """Keeps what each RL step took and gave."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.held_out: dict[str, float] = {}
        self._last = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """The step is over."""
        assert isinstance(pl_module, OnPolicyModule)
        assert batch.rollouts is not None
        now, self._last = self._last, time.perf_counter()
        metrics = pl_module.last_metrics
        self.steps.append(
            {
                "seconds": self._last - now,
                "times": {key[5:]: value for key, value in metrics.items() if key.startswith("time/")},
                "reward": metrics["reward/mean"],
                "staleness": [value for key, value in sorted(metrics.items()) if key[:-1] == "rollout/staleness_"],
                "mismatch_kl": metrics["actor/mismatch_kl"],
                # the update computes each prompt once (share_prompts)
                "tokens": int(batch.rollouts.response_mask.sum()) + sum(map(len, batch.prompt_token_ids)),
            }
        )

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, *unused: Any
    ) -> None:
        """The reward of each question's greedy answer."""
        assert batch.rollouts is not None
        assert batch.rollouts.rewards is not None
        self.held_out.update(zip(batch.rollouts.uids, batch.rollouts.rewards.tolist(), strict=True))


def questions(size: int, *, seed: int) -> ReasoningGymPrompts:
    """One-digit sums."""
    system = "Answer with the number only."
    return ReasoningGymPrompts("chain_sum", size=size, seed=seed, system_prompt=system, task_config=ONE_DIGIT_SUMS)


def run_side(args: argparse.Namespace) -> dict[str, Any]:
    """One run: what `Steps` keeps of it."""
    steps = Steps()
    asynchronous = args.side == "async"
    rollout = VLLMRollout(
        mode="server",
        replicas=1,
        server={"threads": 1},
        in_flight="keep",
        max_staleness=args.max_staleness if asynchronous else 0,
        num_rollouts=args.rollouts,
        max_new_tokens=args.new_tokens,
        max_model_len=128 + args.new_tokens,
        kv_cache_bytes=256 << 20,
        seed=args.seed,
    )
    module = GRPO(
        model=args.model,
        reward=ReasoningGymReward("chain_sum", extract="last_integer", binary=True, task_config=ONE_DIGIT_SUMS),
        optimizer=partial(torch.optim.AdamW, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        rollout_correction="token_tis",
        max_rl_steps=args.steps,
        max_tokens_per_micro_batch=2048,
        seed=args.seed,
    )
    data = PromptDataModule(questions(1024, seed=args.seed), prompts_per_step=args.prompts, seed=args.seed)
    unseen = questions(HELD_OUT, seed=args.seed + 1000)
    held_out = PromptDataModule(unseen, val_source=unseen, prompts_per_step=args.prompts, val_prompts_per_step=HELD_OUT)
    with TemporaryDirectory() as folder:
        sync = WeightSync(engine=args.weight_sync, overlap=asynchronous and args.overlap)
        trainer = quiet_trainer(
            folder, [rollout, sync, steps], strategy=FSDP2RLStrategy(share_prompts=True), precision="bf16-mixed"
        )
        try:
            trainer.fit(module, data)
            trainer.validate(module, datamodule=held_out, verbose=False)
        finally:
            rollout.shutdown()
    return {"steps": steps.steps, "held_out": steps.held_out}


def start_side(args: argparse.Namespace, side: str, *, seed: int) -> dict[str, Any]:
    """A run in a process of its own."""
    load = os.getloadavg()[0]
    names = ("model", "steps", "prompts", "rollouts", "new_tokens", "lr", "max_staleness", "weight_sync")
    options = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    options += ["--overlap"] if args.overlap else []
    started = time.perf_counter()
    done = subprocess.run(
        [*shlex.split(args.prefix), sys.executable, __file__, *options, "--side", side, "--seed", str(seed)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"The {side} run failed with exit code {done.returncode}; its output says why.")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{side}, seed {seed}: {[round(step['seconds'], 1) for step in found['steps']]} s", file=sys.stderr)
    return {
        **found,
        "seed": seed,
        "total_s": round(time.perf_counter() - started, 1),
        "load_average": {"before": round(load, 1), "after": round(os.getloadavg()[0], 1)},
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Times without the first steps of each run; curves with them."""
    timed = [step for run in runs for step in run["steps"][WARM_UP_STEPS:]]
    names = sorted({name for step in timed for name in step["times"]})
    return {
        "seconds_per_step": round(statistics.fmean(step["seconds"] for step in timed), 3),
        "median_s": round(statistics.median(step["seconds"] for step in timed), 3),
        "split_s": {name: round(statistics.fmean(s["times"].get(name, 0.0) for s in timed), 3) for name in names},
        "tokens_per_step": round(statistics.fmean(step["tokens"] for step in timed), 1),
        "ms_per_token": round(1e3 * sum(step["seconds"] for step in timed) / sum(step["tokens"] for step in timed), 3),
        "reward_curves": [[round(step["reward"], 3) for step in run["steps"]] for run in runs],
        "mismatch_kl_mean": round(statistics.fmean(step["mismatch_kl"] for step in timed), 5),
        "seconds": [[round(step["seconds"], 2) for step in run["steps"]] for run in runs],
        "runs": [{key: run[key] for key in ("seed", "total_s", "load_average")} for run in runs],
    }


def compare_policies(sync: list[dict[str, Any]], ahead: list[dict[str, Any]]) -> dict[str, Any]:
    """The trained policies on the same held-out questions.

    The interval of a run's difference is of the questions alone. How much two runs of one side differ, which samples
    happen to come in their first steps, it does not say: compare the runs.
    """
    runs = []
    for one, other in zip(sync, ahead, strict=True):
        differences = [other["held_out"][uid] - reward for uid, reward in one["held_out"].items()]
        mean = statistics.fmean(differences)
        margin = 1.96 * statistics.stdev(differences) / math.sqrt(len(differences))
        runs.append(
            {
                "seed": one["seed"],
                "sync": round(statistics.fmean(one["held_out"].values()), 4),
                "async": round(statistics.fmean(other["held_out"].values()), 4),
                "async_less_sync": round(mean, 4),
                "interval_95": [round(mean - margin, 4), round(mean + margin, 4)],
            }
        )
    return {
        "questions": HELD_OUT,
        "sync": round(statistics.fmean(run["sync"] for run in runs), 4),
        "async": round(statistics.fmean(run["async"] for run in runs), 4),
        "runs": runs,
    }


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Both sides, in turns."""
    around = {**surroundings(), "threads": "one for the trainer, one for the replica"}
    runs: dict[str, list[dict[str, Any]]] = {"sync": [], "async": []}
    for index in range(args.rounds):
        for side in ("sync", "async") if index % 2 == 0 else ("async", "sync"):
            runs[side].append(start_side(args, side, seed=args.seed + index))
    sync, ahead = summary(runs["sync"]), summary(runs["async"])
    sampling = sync["split_s"]["rollout"]
    bound = sync["seconds_per_step"] / max(sampling, sync["seconds_per_step"] - sampling)
    histograms = [step["staleness"] for run in runs["async"] for step in run["steps"][WARM_UP_STEPS:]]
    return {
        "benchmark": "async",
        **around,
        "settings": {
            **{key: getattr(args, key) for key in ("steps", "rounds", "prompts", "rollouts", "new_tokens", "lr")},
            **{key: getattr(args, key) for key in ("max_staleness", "weight_sync", "overlap")},
            "model": args.model.name,
        },
        "ratio_sync_to_async": round(sync["seconds_per_step"] / ahead["seconds_per_step"], 3),
        "ratio_per_token": round(sync["ms_per_token"] / ahead["ms_per_token"], 3),
        "ratio_at_most": round(bound, 3),
        "staleness_share": [round(statistics.fmean(column), 4) for column in zip(*histograms, strict=True)],
        "held_out": compare_policies(runs["sync"], runs["async"]),
        "sync": sync,
        "async": ahead,
    }


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--steps", type=int, default=8, help="RL steps of a run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, each with a seed of its own")
    parser.add_argument("--prompts", type=int, default=8, help="of one step")
    parser.add_argument("--rollouts", type=int, default=8, help="of one prompt")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--weight-sync", default="shm", help="checkpoint engine")
    parser.add_argument("--overlap", action="store_true", help="replicas take weights while the next step computes")
    parser.add_argument("--prefix", default="", help="put before the command of each run, such as 'nice -n -5'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", choices=["sync", "async"], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        parser.error(f"no model at {args.model}; `make train` converts it, or give --model")
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than {WARM_UP_STEPS}: the first {WARM_UP_STEPS} are left out of the times")
    if args.side:
        print(json.dumps(run_side(args)))
        return
    result = bench(args)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for side in ("sync", "async"):
        print(f"{side:6s} {result[side]['seconds_per_step']:6.2f} s a step   {result[side]['split_s']}")
    for name in ("ratio_sync_to_async", "ratio_per_token", "ratio_at_most", "staleness_share", "held_out"):
        print(f"{name}: {result[name]}")


if __name__ == "__main__":
    main()
