"""Every rollout of an RL step in a file: what was asked, answered, rewarded, and how it trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.callbacks.rollout_files import FOLDER, FORMATS, DumpFormat, check_pyarrow, dump_path, write_rows
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.types import Experience, PromptBatch, Rollouts


class RolloutDump(pl.Callback):
    """Writes one file per RL step, a line or row for each rollout of all ranks, ordered by (uid, sample index).

    The file holds no time and no rank: the same seed gives the same file, and its order is that of no layout. Rank 0
    gathers the rows and puts the finished file in place with one rename, so a file is whole or absent. A step that
    is done again after a resume replaces its file. ``lightning-rlhf inspect`` shows what is written.

    Each line of a JSONL file is an object with

    - ``rl_step`` (from 1), ``uid``, ``sample_index``, ``prompt``, ``response``, ``metadata`` of the prompt;
    - ``prompt_token_ids`` and ``response_token_ids``, as sampled; ``response_mask`` where a response holds tokens that
      the policy did not sample;
    - ``rollout_log_probs``, nats, one for each response id, and ``old_log_probs``, by the trainer before the update,
      where the step needed them;
    - ``reward``, null where it failed, and ``reward_components``, unweighted, if there are several;
    - ``advantage``, the mean over the tokens that train, null where none does; ``token_advantages`` if they differ;
    - ``policy_version`` that sampled it (a list, one for each response id, if there were several), ``finish_reason``,
      ``trained`` (false for a row without a reward, or masked).

    A parquet file has these as columns, with null for what a row has not; ``policy_version`` is a list in every row,
    and ``metadata`` and ``reward_components`` are JSON texts.

    Args:
        dirpath: folder of the files; None is ``rollouts`` in the Trainer's ``default_root_dir``.
        every_n_steps: RL steps between two files; the first step has one too.
        format: ``"jsonl"``, or ``"parquet"``, which is smaller and read by column.

    Raises:
        ValueError: if ``every_n_steps`` is below 1, or there is no such format.
        ImportError: for parquet without pyarrow.
    """

    def __init__(
        self,
        *,
        dirpath: str | Path | None = None,
        every_n_steps: int = 1,
        format: DumpFormat = "jsonl",  # noqa: A002 - the word that a user looks for
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}.")
        if format == "parquet":
            check_pyarrow()
        self.format: DumpFormat = format
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.every_n_steps = every_n_steps

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: PromptBatch, batch_idx: int
    ) -> None:
        module = as_on_policy(pl_module, callback=self)
        due = module.rl_step == 1 or module.rl_step % self.every_n_steps == 0
        if not due or batch.rollouts is None:
            return
        failure: OSError | None = None
        # ranks that share a model hold the same rows: one of them speaks
        if module.actor.is_mp_src_rank_with_outputs():
            experience = None if module.step_data is None else module.step_data.experience
            lines = gathered_rows(batch.rollouts, experience, engine=module.actor, rl_step=module.rl_step)
            if trainer.is_global_zero:
                try:
                    folder = Path(trainer.default_root_dir) / FOLDER if self.dirpath is None else self.dirpath
                    write_rows(dump_path(folder, module.rl_step, self.format), lines)
                    for other in FORMATS:  # of a run that was resumed with another format
                        if other != self.format:
                            dump_path(folder, module.rl_step, other).unlink(missing_ok=True)
                except OSError as error:
                    failure = error
        message = trainer.strategy.broadcast(None if failure is None else str(failure))
        if message is not None:
            raise RuntimeError(
                f"Rank 0 could not write the rollouts of RL step {module.rl_step}: {message}"
            ) from failure


def gathered_rows(
    rollouts: Rollouts, experience: Experience | None, *, engine: BaseEngine, rl_step: int
) -> list[dict[str, Any]]:
    """The rows of all data-parallel ranks, on the first of them; empty on the others. Collective.

    A row is sampled on one rank and may train on another: both halves are joined by (uid, sample index).

    Args:
        rollouts: this rank's rows as sampled.
        experience: this rank's rows as trained; None if nothing is known of them.
        engine: gives the data-parallel group.
        rl_step: number of the step.
    """
    sampled = [{"rl_step": rl_step, **row} for row in sampled_rows(rollouts)]
    trained = [] if experience is None else trained_rows(experience)
    if engine.data_parallel_size > 1:
        payload = json.dumps([sampled, trained], default=str).encode()
        parts = _gather_bytes(payload, group=engine.data_parallel_group, device=engine.device)
        halves = [json.loads(part) for part in parts]
        sampled, trained = ([row for half in halves for row in half[side]] for side in (0, 1))
    known = {(row["uid"], row["sample_index"]): row for row in trained}
    nothing = {"advantage": None, "trained": False}
    joined = [{**row, **known.get((row["uid"], row["sample_index"]), nothing)} for row in sampled]
    return sorted(joined, key=lambda row: (row["uid"], row["sample_index"]))


def sampled_rows(rollouts: Rollouts) -> list[dict[str, Any]]:
    """What is known of each row where it was sampled."""
    rows = []
    starts = rollouts.cu_seqlens.tolist()
    for index, uid in enumerate(rollouts.uids):
        span = slice(starts[index], starts[index + 1])
        mask = rollouts.response_mask[span]
        first = _first(mask)
        versions = rollouts.token_versions[span][mask].tolist()
        reward = math.nan if rollouts.rewards is None else float(rollouts.rewards[index])
        row: dict[str, Any] = {
            "uid": uid,
            "sample_index": rollouts.sample_indices[index],
            "prompt": rollouts.prompts[index],
            "response": rollouts.responses[index],
            "metadata": rollouts.metadata[index],
            "reward": _number(reward),
            "finish_reason": rollouts.finish_reasons[index],
            "policy_version": versions[0] if len(set(versions)) == 1 else versions,
            "prompt_token_ids": rollouts.tokens[span][:first].tolist(),
            "response_token_ids": rollouts.tokens[span][first:].tolist(),
            "rollout_log_probs": _numbers(rollouts.rollout_log_probs[span][first:]),
        }
        if rollouts.reward_components is not None:
            row["reward_components"] = {
                name: _number(value) for name, value in rollouts.reward_components[index].items()
            }
        if not bool(mask[first:].all()):
            row["response_mask"] = mask[first:].tolist()
        rows.append(row)
    return rows


def trained_rows(experience: Experience) -> list[dict[str, Any]]:
    """What is known of each row where it trained."""
    rows = []
    data = experience.to("cpu")
    starts = data.cu_seqlens.tolist()
    for index, uid in enumerate(data.uids):
        span = slice(starts[index], starts[index + 1])
        first = _first(data.response_mask[span])
        advantages = data.advantages[span][data.loss_mask[span]]
        row: dict[str, Any] = {
            "uid": uid,
            "sample_index": data.sample_indices[index],
            "advantage": _number(float(advantages.double().mean().float())) if len(advantages) else None,
            "trained": len(advantages) > 0,
        }
        if len(advantages) and bool((advantages != advantages[0]).any()):
            row["token_advantages"] = _numbers(data.advantages[span][first:])
        if data.old_log_probs is not None:
            row["old_log_probs"] = _numbers(data.old_log_probs[span][first:])
        rows.append(row)
    return rows


def _first(mask: torch.Tensor) -> int:
    """Where the response begins: at the first token that the policy sampled, or behind the last of all."""
    found = mask.nonzero()
    return int(found[0]) if len(found) else len(mask)


def _number(value: float) -> float | None:
    """An fp32 number in as few digits as bring it back exactly; null for what JSON has no number for."""
    return float(f"{value:.9g}") if math.isfinite(value) else None


def _numbers(values: torch.Tensor) -> list[float | None]:
    return [_number(value) for value in values.float().tolist()]


def _gather_bytes(payload: bytes, *, group: dist.ProcessGroup | None, device: torch.device) -> list[bytes]:
    """Every rank's payload, in rank order, on the group's first rank; nothing on the others. Collective."""
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    padded = torch.zeros(max(int(one) for one in sizes), dtype=torch.uint8, device=device)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in sizes] if dist.get_rank(group) == 0 else None
    dist.gather(padded, parts, group=group, group_dst=0)
    return [bytes(part[: int(n)].cpu().numpy()) for part, n in zip(parts or [], sizes, strict=False)]
