"""Engines on Lightning's own strategies: one process, or a replica of the model in each process of ``ddp``."""

from __future__ import annotations

import dataclasses

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineHost, EngineRegistry
from lightning_rlhf.contracts.precision import compute_dtype_of

_LOST = (
    "{strategy}: {processes} hold(s) the whole model, its gradients and its optimizer. Lost against "
    "strategy='fsdp2_rl': sharding, sharded checkpoints (here one file, with the random state of rank 0), and long "
    "sequences shared by ranks (strategy='ulysses_rl'). Losses, gradients and samples are the same."
)


def check_strategy(trainer: pl.Trainer) -> None:
    """Refuses a strategy of Lightning that would cut or wrap the engines' models a second time.

    Raises:
        ValueError: naming the strategy and what to use instead.
    """
    strategy = trainer.strategy
    if isinstance(strategy, EngineHost):
        return
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise ValueError(
            f"Trainer(strategy={type(strategy).__name__}) cuts up the LightningModule itself, and the engines of an RL "
            f"module would be cut twice. Use strategy='fsdp2_rl', 'megatron_rl', 'ddp' or 'auto'."
        )
    if isinstance(strategy.launcher, _MultiProcessingLauncher):
        raise ValueError(
            f"This {type(strategy).__name__} starts processes by fork or spawn (ddp_spawn, ddp_fork, ddp_notebook) and "
            "brings back a copy of the module, without its engines. Use strategy='ddp', which starts the script once "
            "per process."
        )


def create_plain_engine(trainer: pl.Trainer, model_type: str, config: EngineConfig) -> BaseEngine:
    """Builds a ``torch`` engine; on several processes each holds a replica, and gradients are summed. Collective.

    DDP's own reduction stays out of it: with manual optimization Lightning leaves it off, and it would average what
    is a sum here.
    """
    strategy = trainer.strategy
    name = type(strategy).__name__
    if config.role == "actor":
        processes = "one process" if trainer.world_size == 1 else f"each of {trainer.world_size} processes"
        rank_zero_info(_LOST.format(strategy=name, processes=processes))
    engine = EngineRegistry.new(
        model_type,
        "torch",
        dataclasses.replace(config, compute_dtype=compute_dtype_of(trainer.precision, strategy=name)),
        device=strategy.root_device,
        **({"process_group": dist.group.WORLD} if trainer.world_size > 1 else {}),
    )
    engine.initialize()
    return engine


def check_plain_engine(trainer: pl.Trainer, role: str, engine: BaseEngine) -> None:
    """A module that another Trainer has used before brings its engines; they must fit this one's plain strategy.

    Raises:
        ValueError: naming what differs.
    """
    if engine.backend != "torch" or engine.data_parallel_size != trainer.world_size:
        raise ValueError(
            f"The module was used with another strategy before: its {role} engine is of the {engine.backend} back end "
            f"on {engine.data_parallel_size} process(es), and does not fit {type(trainer.strategy).__name__} on "
            f"{trainer.world_size}. Start from a new module and pass the checkpoint as ckpt_path=, or use the same "
            "strategy again."
        )
