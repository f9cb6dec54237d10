"""Makes the strategies known to Lightning by name, without importing what they need."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry


def _fsdp2_rl(**kwargs: Any) -> Any:
    from lightning_rlhf.strategies.fsdp2 import FSDP2RLStrategy

    return FSDP2RLStrategy(**kwargs)


def _ulysses_rl(**kwargs: Any) -> Any:
    from lightning_rlhf.strategies.ulysses import UlyssesRLStrategy

    return UlyssesRLStrategy(**kwargs)


def _megatron_rl(**kwargs: Any) -> Any:
    from lightning_rlhf.strategies.megatron import MegatronRLStrategy

    return MegatronRLStrategy(**kwargs)


def register_strategies() -> None:
    """Registers ``fsdp2_rl``, ``ulysses_rl`` and ``megatron_rl``; a second call changes nothing."""
    if "fsdp2_rl" not in StrategyRegistry:
        StrategyRegistry.register("fsdp2_rl", _fsdp2_rl, description="FSDP2 engines for reinforcement learning")
    if "ulysses_rl" not in StrategyRegistry:
        StrategyRegistry.register("ulysses_rl", _ulysses_rl, description="FSDP2 engines with sequence parallelism")
    if "megatron_rl" not in StrategyRegistry:
        StrategyRegistry.register(
            "megatron_rl", _megatron_rl, description="Megatron engines, cut over tp, pp, cp and ep"
        )
