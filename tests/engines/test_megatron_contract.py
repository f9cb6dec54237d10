"""The megatron back end through the engine contract, in layouts of one and two ranks, both model types."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.fork import run_distributed
from support.megatron_imports import megatron_is_imported  # noqa: F401

from engines.by_hand import Subject
from engines.contract import all_checks
from lightning_rlhf.contracts.engine import EngineRegistry
from lightning_rlhf.engines.megatron.layout import MegatronLayout

LAYOUTS = {
    "one": (1, MegatronLayout()),
    "dp2": (2, MegatronLayout()),
    "tp2-sp": (2, MegatronLayout(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, MegatronLayout(pipeline_parallel_size=2)),
    "cp2": (2, MegatronLayout(context_parallel_size=2)),
}
CASES = [
    ("language_model", "one"),
    ("language_model", "dp2"),
    ("language_model", "tp2-sp"),
    ("language_model", "pp2"),
    ("language_model", "cp2"),
    ("value_model", "one"),
    ("value_model", "tp2-sp"),
    ("value_model", "pp2"),
    ("value_model", "cp2"),
]


@pytest.mark.parametrize(("model_type", "layout"), CASES)
def test_contract(model_type: str, layout: str, tmp_path: Path) -> None:
    world_size, sizes = LAYOUTS[layout]
    subject = Subject(
        model_type=model_type,
        make=lambda config: EngineRegistry.new(
            model_type,
            "megatron",
            config,
            device=torch.device("cpu"),
            layout=sizes,
        ),
    )
    run_distributed(all_checks, world_size, subject, tmp_path, timeout=240)
