"""Parts for runs of the command line that load no language model: what a ``_target_`` of a test names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from somewhere import Unresolvable


def reward(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[float]:
    return [0.0 for _ in responses]


class Algorithm(pl.LightningModule):
    """Trains one number towards 0 and writes ``rank<n>.json``: how the process was started and what it was given."""

    def __init__(
        self,
        *,
        model: str | Path,
        reward: Callable[..., Any],
        optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer],
        out: str = ".",
        kl_coef: float = 0.0,
        mini_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        max_tokens_per_micro_batch: int | None = None,
        num_epochs: int = 1,
        estimator: Literal["k1", "k3"] = "k3",
        anything: Unresolvable | None = None,
        options: dict[str, Any] | None = None,
        fail: Literal["no", "construct", "fit", "rank 0", "rank 1"] = "no",
    ) -> None:
        super().__init__()
        if fail == "construct":
            raise ValueError("fail=construct was asked for.")
        self.fail = fail
        self.given = {"kl_coef": kl_coef, "options": options}
        self.types = {name: type(value).__name__ for name, value in (("model", model), ("options", options))}
        self.out, self.optimizer = Path(out), optimizer
        self.number = torch.nn.Parameter(torch.ones(1))

    def on_fit_start(self) -> None:
        if self.fail == "fit":
            raise RuntimeError("fail=fit was asked for.")
        self.out.mkdir(parents=True, exist_ok=True)
        report = {
            "rank": self.global_rank,
            "world_size": self.trainer.world_size,
            "argv": sys.argv,
            "cwd": str(Path.cwd()),
            "seed": torch.initial_seed(),
            "heavy": sorted({"vllm", "megatron"} & set(sys.modules)),
            "pid": os.getpid(),
            "types": self.types,
            **self.given,
        }
        (self.out / f"rank{self.global_rank}.json").write_text(json.dumps(report))
        if self.fail == f"rank {self.global_rank}":
            raise RuntimeError(f"fail={self.fail} was asked for.")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.number * batch).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class Data(pl.LightningDataModule):
    def __init__(self, *, prompts_per_step: int, seed: int = 0) -> None:
        super().__init__()
        self.prompts_per_step = prompts_per_step

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader([torch.ones(1) for _ in range(2 * self.prompts_per_step)], batch_size=1)


class Rollout(pl.Callback):
    def __init__(self, *, num_rollouts: int = 4, stop: Sequence[str] = (), temperature: float = 1.0) -> None:
        self.num_rollouts = num_rollouts


class Sync(pl.Callback):
    def __init__(self, *, engine: str = "naive") -> None:
        self.engine = engine


class Note(pl.Callback):
    def __init__(self, *, every: int = 1) -> None:
        self.every = every


class Strategy(pl.strategies.DDPStrategy):
    def __init__(self, *, shards: int = 1, timeout_seconds: float = 60.0) -> None:
        super().__init__(process_group_backend="gloo")
