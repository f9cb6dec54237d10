from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.cli.layout_checks import layout_problems, mesh_sizes, world_size


def _values(devices: Any = 4, **sizes: Any) -> dict[str, Any]:
    return {"trainer.devices": devices, "trainer.num_nodes": 1, **{f"strategy.{k}_size": v for k, v in sizes.items()}}


def _model(folder: Path, heads: int, kv_heads: int | None) -> str:
    numbers = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (folder / "config.json").write_text(json.dumps(numbers))
    return str(folder)


@pytest.mark.parametrize(
    ("sharers", "devices", "heads", "message"),
    [
        (2, 3, (4, 2), "rollout.tensor_parallel_size: .*size=2.* 3 process"),
        (4, 4, (6, 2), "rollout.tensor_parallel_size: .*size=4.* 6 attention heads"),
        (4, 4, (8, 3), "rollout.tensor_parallel_size: .* 3 key-value heads"),
        (4, 4, (8, 2), None),
    ],
)
def test_processes_that_share_vllms_model(
    tmp_path: Path, sharers: int, devices: int, heads: tuple[int, int], message: str | None
) -> None:
    values = _values(devices, dp_shard="auto") | {"rollout.mode": "colocated", "rollout.tensor_parallel_size": sharers}
    found = layout_problems(values, _model(tmp_path, *heads))
    assert len(found) == (message is not None)
    if message is not None:
        assert re.search(message, found[0])
    assert not layout_problems({**values, "rollout.mode": "server"}, _model(tmp_path, *heads))


def test_the_world_is_devices_times_nodes() -> None:
    assert world_size({"trainer.devices": "2", "trainer.num_nodes": 3}) == 6
    assert world_size({"trainer.devices": "auto", "trainer.accelerator": "cpu"}) == 1
    assert world_size({"trainer.devices": "auto", "trainer.accelerator": "gpu"}) is None


def test_auto_takes_what_is_left() -> None:
    assert mesh_sizes(_values(dp_replicate=2, dp_shard="auto"), 4) == {"dp_replicate": 2, "dp_shard": 2}
    assert mesh_sizes({"strategy": "auto"}, 4) == {}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp_shard": 3, "dp_replicate": 1}, "dp_shard_size=3 x dp_replicate_size=1 does not fit 4 process(es)"),
        ({"dp_shard": "auto", "sp": 3}, "dp_shard_size=auto x sp_size=3 does not fit 4 process(es)"),
        ({"tp": 2, "pp": 3, "cp": 1}, "tp_size=2 x pp_size=3 x cp_size=1 does not fit 4 process(es)"),
        ({"dp_shard": 0}, "dp_shard_size must be at least 1, got 0"),
    ],
)
def test_g03_sizes_that_do_not_fit_the_processes(sizes: dict[str, Any], message: str) -> None:
    (problem,) = layout_problems(_values(**sizes), "somewhere")
    assert problem.startswith("strategy: ")
    assert message in problem


def test_g03_two_ranks_cannot_share_three_heads(tmp_path: Path) -> None:
    (problem,) = layout_problems(_values(2, dp_shard="auto", sp=2), _model(tmp_path, 3, None))
    assert problem.startswith("strategy.sp_size: sp_size=2 does not fit a model with 3 attention heads")


def test_c05_which_numbers_of_ranks_share_forty_heads_and_eight_key_value_heads(tmp_path: Path) -> None:
    model = _model(tmp_path, 40, 8)
    accepted = [sp for sp in (1, 2, 4, 5, 8, 10, 16, 20, 40) if not layout_problems(_values(sp, sp=sp), model)]
    assert accepted == [1, 2, 4, 8, 40]
