from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import write_tiny_model

from lightning_rlhf.rollout.model_directory import ModelDirectory
from lightning_rlhf.rollout.vllm_build import engine_arguments


@pytest.mark.parametrize(("seed", "engines"), [(42, 42), (2**32 - 1, 2**32 - 1), (2**32 + 5, 5), (2**63, 0)])
def test_e01_any_base_seed_gives_the_engine_one_that_it_takes(tmp_path: Path, seed: int, engines: int) -> None:
    write_tiny_model(tmp_path, layers=1)
    arguments = engine_arguments(
        ModelDirectory.read(tmp_path),
        dtype="float32",
        max_model_len=32,
        max_num_seqs=4,
        kv_cache_bytes=1 << 20,
        enable_prefix_caching=True,
        load_format="dummy",
        logprobs_mode="processed_logprobs",
        seed=seed,
        engine_kwargs=None,
    )
    assert arguments["seed"] == engines
