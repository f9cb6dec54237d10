"""Runs on a toy task whose rollouts are written down, and the same runs with these in place of sampling."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_rlhf.callbacks import HFRollout
from lightning_rlhf.contracts.callback import RLCallback
from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig
from lightning_rlhf.modules import OnPolicyModule
from lightning_rlhf.rollout.hf import HFReferenceEngine
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import toy_data, toy_module, toy_ppo, toy_trainer

Curve = list[dict[str, float]]
Rows = list[dict[str, Any]]

FOLDER = Path(__file__).parents[1] / "invariant"
STEPS = 8
ROLLOUT: dict[str, Any] = {"num_rollouts": 4, "max_new_tokens": 8, "max_model_len": 64}
POLICY = ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/ratio_max", "actor/approx_kl", "reward/mean")
CRITIC = ("critic/loss", "critic/grad_norm", "critic/value_mean")


def _megatron() -> Any:
    from lightning_rlhf.strategies.megatron import MegatronRLStrategy

    return MegatronRLStrategy(tensor_parallel_size=2)


def _ulysses() -> Any:
    from lightning_rlhf.strategies import UlyssesRLStrategy

    return UlyssesRLStrategy(sp_size=2)


LAYOUTS: dict[str, tuple[Callable[[], Any], int]] = {
    "one process": (lambda: "auto", 1),
    "fsdp2_rl, 2 ranks": (lambda: "fsdp2_rl", 2),
    "ulysses_rl, sp 2": (_ulysses, 2),
    "megatron_rl, tp 2": (_megatron, 2),
}
"""By name: what makes the strategy, within the ranks, and the number of ranks."""

MODULES: dict[str, tuple[Callable[..., OnPolicyModule], dict[str, Any], tuple[str, ...]]] = {
    # two optimizer steps in each RL step: the second one's ratios are not 1
    "ppo": (
        toy_ppo,
        {"mini_batch_size": 8, "critic_optimizer": partial(torch.optim.AdamW, lr=3e-3, eps=1e-4, weight_decay=0.0)},
        (*POLICY, *CRITIC),
    ),
    "grpo": (toy_module, {"mini_batch_size": 8}, POLICY),
}
"""By name: the module, its arguments beside model and steps, and the metrics that are compared."""


class ReplayEngine(HFReferenceEngine):
    """Gives the responses that another run has sampled; takes weights and scores like any other engine."""

    recorded: list[Rows]

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, rl_step: int) -> Rollouts:
        rows = {(row["uid"], row["sample"]): row for row in self.recorded[rl_step]}
        assert self.weight_version is not None
        return Rollouts.from_sequences(
            [
                RolloutSequence(
                    uid=uid,
                    sample_index=sample,
                    prompt_token_ids=prompts.prompt_token_ids[index],
                    response_token_ids=rows[uid, sample]["ids"],
                    log_probs=rows[uid, sample]["log_probs"],
                    policy_version=self.weight_version,
                    finish_reason=rows[uid, sample]["finish"],
                    prompt=prompts.prompts[index],
                    response=rows[uid, sample]["text"],
                    metadata=prompts.metadata[index],
                )
                for index, uid in enumerate(prompts.uids)
                for sample in range(sampling.n)
            ]
        )


class ReplayRollout(HFRollout):
    """A rollout callback over ``ReplayEngine``."""

    def __init__(self, recorded: list[Rows]) -> None:
        super().__init__(**ROLLOUT)
        self.recorded = recorded

    def build_engine(self, trainer: pl.Trainer, model_directory: str | Path) -> RolloutEngine:
        engine = ReplayEngine(model_directory, max_model_len=self.max_model_len, device=trainer.strategy.root_device)
        engine.recorded = self.recorded
        return engine


class Notes(RLCallback):
    """Keeps each RL step's metrics and, on this rank, its rollouts."""

    def __init__(self) -> None:
        self.curve: Curve = []
        self.rows: list[Rows] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, OnPolicyModule)
        assert batch.rollouts is not None
        self.curve.append(dict(pl_module.last_metrics))
        self.rows.append(rows_of(batch.rollouts))


def rows_of(rollouts: Rollouts) -> Rows:
    """Responses as plain data; log-probs to seven digits."""
    rows = []
    for row in range(len(rollouts)):
        start, end = rollouts.cu_seqlens[row : row + 2].tolist()
        sampled = rollouts.response_mask[start:end]
        rows.append(
            {
                "uid": rollouts.uids[row],
                "sample": rollouts.sample_indices[row],
                "ids": rollouts.tokens[start:end][sampled].tolist(),
                "log_probs": [float(f"{x:.7g}") for x in rollouts.rollout_log_probs[start:end][sampled].tolist()],
                "finish": rollouts.finish_reasons[row],
                "text": rollouts.responses[row],
            }
        )
    return rows


def write_model(path: Path) -> Path:
    """The model of all these runs: two key-value heads, so that it can be cut in two."""
    return write_tiny_model(path, hidden=128, family="llama")


def run(
    algorithm: str,
    layout: str,
    *,
    root: Path,
    model: Path,
    recorded: list[Rows] | None = None,
    steps: int = STEPS,
    **changes: Any,
) -> list[tuple[Curve, list[Rows]]]:
    """Trains; gives each rank's metrics and rollouts of every RL step. Samples, unless rollouts are given."""
    ranks = LAYOUTS[layout][1]
    arguments: dict[str, Any] = {"root": root, "model": model, "recorded": recorded, "steps": steps, **changes}
    if ranks == 1:
        return [_fit(algorithm, layout, **arguments)]
    return run_distributed(_fit, ranks, algorithm, layout, init_process_group=False, timeout=200.0, **arguments)


def _fit(
    algorithm: str, layout: str, *, root: Path, model: Path, recorded: list[Rows] | None, steps: int, **changes: Any
) -> tuple[Curve, list[Rows]]:
    make_strategy, ranks = LAYOUTS[layout]
    make_module, settings, _ = MODULES[algorithm]
    notes = Notes()
    pl.seed_everything(11, verbose=False)
    rollout = HFRollout(**ROLLOUT) if recorded is None else ReplayRollout(recorded)
    trainer = toy_trainer(root, callbacks=[notes], rollout=rollout, strategy=make_strategy(), devices=ranks)
    trainer.fit(make_module(model, max_rl_steps=steps, **{**settings, **changes}), toy_data())
    return notes.curve, notes.rows


def trajectory_path(algorithm: str) -> Path:
    """Where the committed one of an algorithm stands."""
    return FOLDER / f"{algorithm}_tiny.json"


def write_trajectory(algorithm: str, root: Path) -> Path:
    """Samples a run in one process, and writes its rollouts and metrics."""
    ((curve, rows),) = run(algorithm, "one process", root=root, model=write_model(root / "model"))
    names = MODULES[algorithm][2]
    steps = [
        {"metrics": {name: float(f"{metrics[name]:.9g}") for name in names}, "rows": step}
        for metrics, step in zip(curve, rows, strict=True)
    ]
    path = trajectory_path(algorithm)
    lines = [json.dumps(step, separators=(",", ":")) for step in steps]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return path


def read_trajectory(algorithm: str) -> tuple[Curve, list[Rows]]:
    """The committed metrics and rollouts of every RL step."""
    steps: list[Mapping[str, Any]] = json.loads(trajectory_path(algorithm).read_text(encoding="utf-8"))
    return [dict(step["metrics"]) for step in steps], [list(step["rows"]) for step in steps]
