"""How the replicas of a run are built, before any of them is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlhf.callbacks.served_rollout import ServerSettings, _configs


@pytest.mark.parametrize("base", [42, 43])
def test_e01_each_replica_has_a_seed_of_its_own_from_the_base(base: int) -> None:
    """The workers of one replica are built from one config, so they share its seed."""
    settings = ServerSettings(replicas=4, tensor_parallel_size=2)
    replica = {"seed": base, "max_model_len": 64, "kv_cache_bytes": 1 << 20}
    configs = _configs(settings, Path("model"), replica)
    assert [config.seed for config in configs] == [base, base + 1, base + 2, base + 3]
    assert {config.tensor_parallel_size for config in configs} == {2}
