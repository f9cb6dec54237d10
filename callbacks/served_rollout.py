"""Replicas for a Trainer: started by its first rank, or given by URL; the other ranks learn where they are."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_rlhf.batching.exchange import all_gather_bytes

if TYPE_CHECKING:
    from lightning_rlhf.rollout.replica_process import ReplicaConfig
    from lightning_rlhf.rollout.served import ServedRolloutEngine

TOKEN_VARIABLE = "LIGHTNING_RLHF_REPLICA_TOKEN"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How replicas are started and used.

    Attributes:
        replicas: how many the run starts.
        tensor_parallel_size: devices that share one replica's model.
        devices: CUDA devices of each replica; needed where there are any, so that no two parts of a run share one.
        urls: of replicas that run already; none is started then.
        token: that those ask for; None reads it from the environment, ``LIGHTNING_RLHF_REPLICA_TOKEN``.
        in_flight: what new weights do to responses under way, ``keep`` or ``resubmit``; see `ServedRolloutEngine`.
        threads: CPU threads of one replica's worker; None leaves it to torch.
        start_seconds: longest time from a replica's start until it answers.
        stall_seconds: longest time that a replica may take for one token.
        max_deaths: how often one replica is started again before it is given up.

    Raises:
        ValueError: for what does not fit together.
    """

    replicas: int = 1
    tensor_parallel_size: int = 1
    devices: Sequence[Sequence[int]] | None = None
    urls: Sequence[str] = field(default_factory=tuple)
    token: str | None = None
    in_flight: Literal["keep", "resubmit"] = "keep"
    threads: int | None = None
    start_seconds: float = 300.0
    stall_seconds: float = 120.0
    max_deaths: int = 3

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if self.replicas < 1 or self.tensor_parallel_size < 1:
            raise ValueError(
                f"replicas={self.replicas} and tensor_parallel_size={self.tensor_parallel_size} must be at least 1."
            )
        if not self.start_seconds > 0 or not self.stall_seconds > 0 or self.max_deaths < 0:
            raise ValueError(
                f"start_seconds={self.start_seconds} and stall_seconds={self.stall_seconds} must be more than 0, "
                f"max_deaths={self.max_deaths} at least 0."
            )
        if self.in_flight not in ("keep", "resubmit"):
            raise ValueError(f"in_flight={self.in_flight!r}: expected 'keep' or 'resubmit'.")
        self._check_urls()
        if self.urls and (self.replicas != 1 or self.tensor_parallel_size != 1 or self.devices is not None):
            raise ValueError(
                "urls= names replicas that run already: replicas=, tensor_parallel_size= and devices= are decided "
                "where they were started."
            )
        if self.devices is not None:
            wrong = [list(one) for one in self.devices if len(one) != self.tensor_parallel_size]
            if len(self.devices) != self.replicas or wrong:
                raise ValueError(
                    f"devices= needs {self.replicas} lists of {self.tensor_parallel_size} device numbers, one list for "
                    f"each replica, got {[list(one) for one in self.devices]}."
                )

    def _check_urls(self) -> None:
        if isinstance(self.urls, str):
            raise ValueError(f"urls= is a list, got one text: say urls=[{self.urls!r}].")
        if wrong := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"urls= begin with http:// or https://, got {wrong}.")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(f"urls= names a replica twice: {list(self.urls)}.")

    def token_of_urls(self) -> str:
        """The token of replicas that run already.

        Raises:
            ValueError: if there is none.
        """
        token = self.token or os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ValueError(f"Replicas given by urls= ask for their token: say token=, or set {TOKEN_VARIABLE}.")
        if not token.isprintable() or token != token.strip():
            raise ValueError("The replicas' token has white space or a line's end around it, or control characters.")
        return token


def build_served_engine(
    settings: ServerSettings, trainer: pl.Trainer, model: str | Path, *, replica: dict[str, Any]
) -> ServedRolloutEngine:
    """Starts the replicas on the first rank, and gives each rank its engine. Collective.

    Args:
        settings: how many, where, or which.
        trainer: whose ranks use them.
        model: directory with config and tokenizer.
        replica: more of `ReplicaConfig`, of which ``max_model_len`` is used on this side, too.

    Raises:
        RuntimeError: on every rank, if the replicas could not be started, or the model has tensors that vLLM cannot be
            given (with one rank a ValueError).
    """
    from lightning_rlhf.rollout.model_directory import weight_names_at
    from lightning_rlhf.rollout.served import ServedRolloutEngine

    common: dict[str, Any] = {
        "max_model_len": replica["max_model_len"],
        "rank": trainer.global_rank,
        "in_flight": settings.in_flight,
        "pool_settings": {"start_seconds": settings.start_seconds, "max_deaths": settings.max_deaths},
        "client_settings": {"stall_seconds": settings.stall_seconds},
    }
    engine: ServedRolloutEngine | None = None
    error = ""
    if trainer.global_rank == 0:
        try:
            weight_names_at(model)  # tensors that vLLM cannot be given are named before anything is started
            if settings.urls:
                urls, token = tuple(settings.urls), settings.token_of_urls()
                engine = ServedRolloutEngine(model, urls=urls, token=token, **common)
            else:
                engine = ServedRolloutEngine(model, fleet_configs=_configs(settings, model, replica), **common)
        except (RuntimeError, ValueError, OSError) as caught:
            if trainer.world_size == 1:
                raise
            error = f"{type(caught).__name__}: {caught}"
    if trainer.world_size > 1:
        where = _from_first_rank(trainer, engine, error)
        if where["error"]:
            raise RuntimeError(f"The first rank could not reach or start the rollout replicas: {where['error']}")
        if engine is None:
            engine = ServedRolloutEngine(model, urls=where["urls"], token=where["token"], leads=False, **common)
    assert engine is not None
    return engine


def _from_first_rank(trainer: pl.Trainer, engine: ServedRolloutEngine | None, error: str) -> dict[str, Any]:
    own = b""
    if trainer.global_rank == 0:
        where = {"urls": engine.urls if engine else (), "token": engine.token if engine else "", "error": error}
        own = json.dumps(where).encode()
    device = trainer.strategy.root_device
    answer: dict[str, Any] = json.loads(all_gather_bytes(own, group=dist.group.WORLD, device=device)[0])
    return answer


def _configs(settings: ServerSettings, model: str | Path, replica: dict[str, Any]) -> list[ReplicaConfig]:
    from lightning_rlhf.rollout.replica_process import ReplicaConfig

    if torch.cuda.is_available() and settings.devices is None:
        raise ValueError(
            "This machine has CUDA devices: say which of them each replica gets, for example "
            "VLLMRollout(mode='server', replicas=2, devices=[[6], [7]]), and leave those out of Trainer(devices=...)."
        )
    seed = replica.pop("seed", 0)
    return [
        ReplicaConfig(
            model=str(model),
            tensor_parallel_size=settings.tensor_parallel_size,
            devices=list(settings.devices[index]) if settings.devices is not None else None,
            num_threads=settings.threads,
            seed=seed + index,
            **replica,
        )
        for index in range(settings.replicas)
    ]
