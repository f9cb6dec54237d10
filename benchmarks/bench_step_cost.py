"""What an RL step costs over the number of prompts, the length of responses and the ranks, without sampling.

GRPO steps of a small random model through the Trainer: rewards, the global plan, the exchange of rows, advantages, the
update and the weight push. The rollout engine makes its responses up, so that lengths are exact and sampling costs
nothing. Two processes are ``fsdp2_rl``; one is the plain strategy. A line is fitted by least squares to the computing
time of a rank: ``seconds = fixed + per_row * rows + per_token * tokens``, rows and tokens of that rank.

    python benchmarks/bench_step_cost.py --json > benchmarks/results/step_cost.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from measuring import print_rows, smol_model, surroundings
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.callbacks import HFRollout, WeightSync
from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig
from lightning_rlhf.data import ListPrompts, PromptDataModule
from lightning_rlhf.modules import GRPO
from lightning_rlhf.rollout.hf import HFReferenceEngine
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence

VOCABULARY = 1024
PROMPTS, LENGTHS, RANKS = (2, 4, 8), (8, 24, 64), (1, 2)
GROUP, REPEATS = 4, 2


class MadeUp(HFReferenceEngine):
    """Takes weights like any engine; its responses are random tokens of the length that is the step's turn."""

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, rl_step: int) -> Rollouts:
        length = length_of(rl_step)
        draw = torch.Generator().manual_seed(rl_step)
        assert self.weight_version is not None
        return Rollouts.from_sequences(
            [
                RolloutSequence(
                    uid=uid,
                    sample_index=sample,
                    prompt_token_ids=prompts.prompt_token_ids[index],
                    response_token_ids=torch.randint(3, VOCABULARY, (length,), generator=draw).tolist(),
                    log_probs=[-6.9] * length,
                    policy_version=self.weight_version,
                    finish_reason="length",
                    prompt=prompts.prompts[index],
                    response=str(sample),
                    metadata=prompts.metadata[index],
                )
                for index, uid in enumerate(prompts.uids)
                for sample in range(sampling.n)
            ]
        )


class MadeUpRollout(HFRollout):
    """A rollout callback over ``MadeUp``."""

    def build_engine(self, trainer: pl.Trainer, model_directory: str | Path) -> RolloutEngine:
        return MadeUp(model_directory, max_model_len=self.max_model_len, device=trainer.strategy.root_device)


class Clock(pl.Callback):
    """Computing time of this rank's steps, weight push and all."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.process_time() - self._start)


def length_of(rl_step: int) -> int:
    return LENGTHS[rl_step % len(LENGTHS)]


def parity(_prompts: list[str], responses: list[str], _metadata: list[dict[str, Any]]) -> list[float]:
    return [float(int(response) % 2) for response in responses]


def write_model(folder: Path) -> None:
    smol_model(layers=2, vocabulary=VOCABULARY).save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{index}": index for index in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def child(model: Path, ranks: int, out: Path) -> None:
    """All steps with so many processes; Lightning starts this program again for each other rank."""
    torch.set_num_threads(1)
    rows = []
    for prompts in PROMPTS:
        clock = Clock()
        steps = len(LENGTHS) * (REPEATS + 1)
        trainer = pl.Trainer(
            strategy="fsdp2_rl" if ranks > 1 else "auto", devices=ranks, accelerator="cpu", logger=False,
            max_epochs=-1, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            callbacks=[clock, MadeUpRollout(num_rollouts=GROUP, max_new_tokens=max(LENGTHS)), WeightSync()],
        )  # fmt: skip
        module = GRPO(
            model=model, reward=parity, optimizer=partial(torch.optim.AdamW, lr=1e-6), max_rl_steps=steps,
            max_tokens_per_micro_batch=1024,
        )  # fmt: skip
        data = PromptDataModule(ListPrompts([f"w{index + 3} w7 w8" for index in range(16)]), prompts_per_step=prompts)
        trainer.fit(module, data)
        rows += [
            {"prompts": prompts, "response_tokens": length_of(step), "seconds": seconds}
            for step, seconds in enumerate(clock.seconds)
            if step >= len(LENGTHS)  # the first of each length is left out
        ]
    if trainer.is_global_zero:
        out.write_text(json.dumps(rows))


def fit(rows: list[dict[str, Any]], *, ranks: int) -> dict[str, Any]:
    """Least squares, and the share of the variance that the line accounts for."""
    own = np.array([row["prompts"] * GROUP / ranks for row in rows])
    tokens = own * np.array([row["response_tokens"] + 3 for row in rows])
    seconds = np.array([row["seconds"] for row in rows])
    columns = np.stack([np.ones_like(own), own, tokens], axis=1)
    solution = np.linalg.lstsq(columns, seconds, rcond=None)[0]
    left = seconds - columns @ solution
    explained = 1.0 - float((left**2).sum() / ((seconds - seconds.mean()) ** 2).sum())
    names = ("fixed_ms", "per_row_ms", "per_token_ms")
    return {
        **{name: round(1e3 * float(x), 4) for name, x in zip(names, solution, strict=True)},
        "r2": round(explained, 4),
    }


def report() -> dict[str, Any]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        found = {}
        for ranks in RANKS:
            out = folder / f"{ranks}.json"
            command = [sys.executable, "-W", "ignore", __file__, "--child", str(ranks), str(folder / "model"), str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            found[ranks] = json.loads(out.read_text())
    medians: dict[tuple[int, int, int], float] = {}
    for ranks, rows in found.items():
        for prompts in PROMPTS:
            for length in LENGTHS:
                same = [r["seconds"] for r in rows if (r["prompts"], r["response_tokens"]) == (prompts, length)]
                medians[ranks, prompts, length] = statistics.median(same)
    table = [
        {
            "ranks": ranks,
            "prompts": prompts,
            "response_tokens": length,
            "milliseconds": round(1e3 * seconds, 1),
            "of_one_rank": round(seconds / medians[1, prompts, length], 3),
        }
        for (ranks, prompts, length), seconds in medians.items()
    ]
    return {
        "benchmark": "step_cost",
        **surroundings(),
        "model": "SmolLM2's width, 2 layers, vocabulary 1024, fp32, one thread a rank",
        "group": GROUP,
        "fits": {str(ranks): fit(rows, ranks=ranks) for ranks, rows in found.items()},
        "rows": table,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="An RL step's computing time of a rank, without sampling.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--child", nargs=3, metavar=("RANKS", "MODEL", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        ranks, model, out = arguments.child
        child(Path(model), int(ranks), Path(out))
        return
    found = report()
    print_rows(
        found,
        as_json=arguments.json,
        heading="ranks  prompts  response tokens  ms of a rank  of one rank's",
        line=lambda row: (
            f"{row['ranks']:5d}  {row['prompts']:7d}  {row['response_tokens']:15d}  {row['milliseconds']:12.1f}  "
            f"{row['of_one_rank']:13.3f}"
        ),
    )
    for ranks, line in found["fits"].items() if not arguments.json else ():
        print(f"{ranks} rank(s): {line}")


if __name__ == "__main__":
    main()
