"""How the replicas of a run are built, before any of them is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny_experts import write_tiny_experts
from torch import Tensor

from lightning_rlhf.callbacks.served_rollout import ServerSettings, _configs, build_served_engine


@pytest.mark.parametrize("base", [42, 43])
def test_e01_each_replica_has_a_seed_of_its_own_from_the_base(base: int) -> None:
    """The workers of one replica are built from one config, so they share its seed."""
    settings = ServerSettings(replicas=4, tensor_parallel_size=2)
    replica = {"seed": base, "max_model_len": 64, "kv_cache_bytes": 1 << 20}
    configs = _configs(settings, Path("model"), replica)
    assert [config.seed for config in configs] == [base, base + 1, base + 2, base + 3]
    assert {config.tensor_parallel_size for config in configs} == {2}


def test_a_model_that_vllm_cannot_be_given_is_named_before_replicas_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    path = write_tiny_experts(tmp_path, "qwen3_moe")

    def fails(model: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
        if len(named) == 1 and any("gate_up_proj" in name for name in named):
            raise ValueError("no way back")
        return named

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", fails)
    trainer: Any = SimpleNamespace(global_rank=0, world_size=1)
    replica = {"max_model_len": 64, "kv_cache_bytes": 1 << 20}
    with pytest.raises(ValueError, match=r"Qwen3Moe.*'model.layers.0.mlp.experts.gate_up_proj'.*no way back"):
        build_served_engine(ServerSettings(), trainer, path, replica=replica)
