"""The command refuses what cannot be run: exit status, message, and that nothing heavy was loaded by then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]

# One process for all command lines, for the imports take seconds.
RUNNER = """
import contextlib, io, json, sys
from lightning_rlhf.cli.main import main
results = {}
for name, arguments in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["train", *arguments])
        except SystemExit as leave:
            status = leave.code
    heavy = ["vllm", "megatron", "ray", "transformers.modeling_utils", "lightning_rlhf.rollout.vllm"]
    results[name] = [status, out.getvalue(), err.getvalue(), [module for module in heavy if module in sys.modules]]
json.dump(results, sys.stdout)
"""

MISSPELT = """# @package _global_
algorithm:
  kl_coeff: 0.1
"""

CASES = {
    "g01 misspelt": (["algorithm.kl_coeff=0.1"], "algorithm.kl_coeff: unknown; did you mean algorithm.kl_coef?"),
    "g01 misspelt level and key": (["algo.kl_coeff=0.1"], "algo.kl_coeff: unknown; did you mean algorithm.kl_coef?"),
    "g01 forced": (["++algorithm.kl_coeff=0.1"], "algorithm.kl_coeff: unknown; did you mean algorithm.kl_coef?"),
    "g01 added": (["+algo.kl_coeff=0.1"], "algo.kl_coeff: unknown; did you mean algorithm.kl_coef?"),
    "g01 in YAML": (["experiment=misspelt"], "algorithm.kl_coeff: unknown; did you mean algorithm.kl_coef?"),
    "g01 wrong level, root": (["kl_coef=0.1"], "kl_coef: unknown; did you mean algorithm.kl_coef?"),
    "g01 wrong level, another group": (["trainer.lr=1"], "trainer.lr: unknown; did you mean algorithm.optimizer.lr?"),
    "g01 wrong level, too high": (["algorithm.lr=1"], "algorithm.lr: unknown; did you mean algorithm.optimizer.lr?"),
    "g01 another strategy's": (
        ["strategy.tensor_parallel_size=2"],
        (
            "strategy.tensor_parallel_size: unknown to lightning_rlhf.strategies.FSDP2RLStrategy; it belongs to "
            "strategy=megatron_rl."
        ),
    ),
    "g01 another option's": (
        ["rollout=hf", "rollout.kv_cache_bytes=1"],
        (
            "rollout.kv_cache_bytes: unknown to lightning_rlhf.callbacks.HFRollout; it belongs to rollout=tools, "
            "rollout=vllm."
        ),
    ),
    "type": (["algorithm.optimizer.lr=abc"], "algorithm.optimizer.lr: expected float, got 'abc'."),
    "literal": (
        ["data.overlong=drp"],
        "data.overlong: expected 'error' or 'drop' or 'truncate_left', got 'drp'.",
    ),
    "missing": (["model=tiny"], "model.path: no value given (???). Set model.path=..."),
    "option": (
        ["algorithm=grop"],
        (
            "algorithm=grop: unknown; did you mean algorithm=grpo? "
            "Known: cispo, dapo, dr_grpo, grpo, gspo, ppo, reinforce_plus_plus, rloo."
        ),
    ),
    "g02 1": (
        ["data.prompts_per_step=4", "rollout.num_rollouts=2", "trainer.devices=3"],
        (
            "prompts_per_step=4 does not divide over 3 data-parallel ranks: every rank samples for the same number of "
            "prompts. Use 3 or 6."
        ),
    ),
    "g02 2": (
        ["algorithm.mini_batch_size=4", "algorithm.micro_batch_size=8"],
        (
            "micro_batch_size=8 is larger than a rank's share of the mini-batch, which is mini_batch_size=4 / 1 "
            "data-parallel ranks = 4 rollouts. Use micro_batch_size=4 or less, or mini_batch_size=8 or more."
        ),
    ),
    "g02 3": (
        ["algorithm.mini_batch_size=2", "trainer.devices=4"],
        (
            "mini_batch_size=2 leaves some of the 4 data-parallel ranks without a rollout. "
            "mini_batch_size counts rollouts over all ranks; use one of 4, 8, 16, 32, 64."
        ),
    ),
    "g02 4": (
        ["data.prompts_per_step=4", "rollout.num_rollouts=2", "algorithm.mini_batch_size=3"],
        (
            "mini_batch_size=3 does not divide the 8 rollouts of a step (4 prompts x 2 rollouts): 2 would be lost. "
            "mini_batch_size counts rollouts over all ranks; use one of 1, 2, 4, 8."
        ),
    ),
    "g02 5": (
        ["data.prompts_per_step=4", "rollout.num_rollouts=2", "algorithm.mini_batch_size=16"],
        (
            "mini_batch_size=16 is larger than the 8 rollouts of a step (4 prompts x 2 rollouts). "
            "mini_batch_size counts rollouts over all ranks; use one of 1, 2, 4, 8."
        ),
    ),
    "constructor": (["data.max_prompt_tokens=0"], "data: max_prompt_tokens must be at least 1, got 0."),
    "the working directory as run_dir": (
        ["run_dir=."],
        "run_dir: . is or holds the working directory; a run needs a folder of its own.",
    ),
}


@dataclass(frozen=True)
class Refusal:
    status: int
    out: str
    err: str
    heavy: list[str]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Refusal]:
    folder = tmp_path_factory.mktemp("refused")
    (folder / "model").mkdir()
    (folder / "configs" / "experiment").mkdir(parents=True)
    (folder / "configs" / "experiment" / "misspelt.yaml").write_text(MISSPELT)
    lines = {}
    for name, (arguments, _) in CASES.items():
        model = [] if "model=tiny" in arguments else [f"model.path={folder / 'model'}"]
        lines[name] = ["--config-dir", str(folder / "configs"), *model, *arguments]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = {name: Refusal(*result) for name, result in json.loads(done.stdout).items()}
    return results.__getitem__


@pytest.mark.parametrize("name", CASES)
def test_g01_g02_refused_before_a_model_is_loaded(name: str, refusals: Callable[[str], Refusal]) -> None:
    refusal = refusals(name)
    assert refusal.status == 2
    assert refusal.heavy == []
    assert refusal.err == f"lightning-rlhf train: {CASES[name][1]}\n"  # no traceback, no second opinion
    assert refusal.out == ""
