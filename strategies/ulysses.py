"""FSDP2 engines with sequence parallelism, on a ``dp_replicate x dp_shard x sp`` mesh."""

from __future__ import annotations

from typing import Literal

from lightning_rlhf.batching.shared_prompts import check_shared_prompts
from lightning_rlhf.strategies.fsdp2 import FSDP2RLStrategy


class UlyssesRLStrategy(FSDP2RLStrategy):
    """``fsdp2_rl`` in which ``sp`` ranks share each sequence; named ``ulysses_rl``.

    The ranks of an ``sp`` group hold a slice each of a micro-batch's tokens, and with it about ``1 / sp`` of its
    activations. They generate and score a share each of the group's prompts, and then all hold all of its rollouts.
    Parameters, gradients and optimizer state are sharded over ``dp_shard x sp``. Only models whose attention heads
    can be dealt to ``sp`` ranks are taken, see ``engines.sequence_parallel.check_heads``.

    Args:
        sp_size: ranks that share a sequence; neighbours, so that they are on one node.
        dp_shard_size: groups of them that share one copy of the parameters; ``"auto"`` takes all that are left.
        dp_replicate_size: such copies (hybrid sharding).
        reshard_after_forward: free a layer's full parameters between its forward and backward.
        cpu_offload: keep parameters, gradients and optimizer state on the host, see ``engines.fsdp2.FSDP2Engine``.
        offload_model: keep parameters and gradients in host memory between uses, around a rollout above all; see
            ``EngineConfig.offload_model``.
        offload_optimizer: the optimizer's state likewise.
        share_prompts: compute the tokens that rollouts of one prompt begin with once in a micro-batch; pays where
            prompts are long beside the responses, and only with ``sp_size=1``. See ``EngineConfig.share_prompts``.
        async_save: write checkpoints while training goes on, from a copy in host memory; the next save and the end of
            training wait for the one before, and raise what its writer raised. It takes the name of a checkpoint only
            once it is whole on every rank.
        timeout_seconds: how long a collective may wait for a peer.
        process_group_backend: ``gloo`` or ``nccl``; None chooses by device.

    Raises:
        ValueError: for shared prompts on ``sp`` ranks.
    """

    backend = "ulysses"

    def __init__(
        self,
        *,
        sp_size: int = 1,
        dp_shard_size: int | Literal["auto"] = "auto",
        dp_replicate_size: int = 1,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        offload_model: bool = False,
        offload_optimizer: bool = False,
        share_prompts: bool = False,
        async_save: bool = False,
        timeout_seconds: float = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        check_shared_prompts(share_prompts=share_prompts, sp_size=sp_size)
        super().__init__(
            dp_shard_size=dp_shard_size,
            dp_replicate_size=dp_replicate_size,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            offload_model=offload_model,
            offload_optimizer=offload_optimizer,
            share_prompts=share_prompts,
            async_save=async_save,
            timeout_seconds=timeout_seconds,
            process_group_backend=process_group_backend,
        )
        self.sizes["sp"] = sp_size
