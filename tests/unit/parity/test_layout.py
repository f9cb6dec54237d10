from __future__ import annotations

import pytest

from lightning_rlhf.parity.layout import build_strategy, parse_layout, world_size


def test_a_layout_is_read_and_multiplied() -> None:
    layout = parse_layout("dp_replicate=2, dp_shard=3")
    assert layout == {"dp_replicate": 2, "dp_shard": 3}
    assert world_size("fsdp2_rl", layout) == 6


@pytest.mark.parametrize(
    ("text", "processes"),
    [
        ("tp=2", 2),
        ("tp=2,sp=1", 2),
        ("pp=2,vpp=2", 2),
        ("ep=2", 2),
        ("tp=2,ep=2,etp=1", 2),
        ("tp=2,ep=2,etp=2", 4),
        ("tp=2,pp=2,dp=2", 8),
        ("ep=4,cp=2,tp=2,pp=2,etp=1", 8),
    ],
)
def test_axes_of_megatron_share_processes(text: str, processes: int) -> None:
    assert world_size("megatron_rl", parse_layout(text)) == processes


def test_axes_of_megatron_reach_its_strategy() -> None:
    strategy = build_strategy("megatron_rl", {"tp": 2, "sp": 1, "dp": 2, "etp": 1})
    layout = strategy.layout  # type: ignore[attr-defined]
    assert (layout.tensor_parallel_size, layout.sequence_parallel, layout.etp_size) == (2, True, 1)
    with pytest.raises(ValueError, match="write sp=1 to turn it on"):
        build_strategy("megatron_rl", {"tp": 2, "sp": 2})


@pytest.mark.parametrize("text", ["", "dp_shard", "dp_shard=x", "dp_shard=0", "dp_shard=-1", "=2", "dp_shard=2,"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--layout: cannot read"):
        parse_layout(text)


def test_an_axis_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="dp_shard is given twice"):
        parse_layout("dp_shard=2,dp_shard=2")


def test_sizes_reach_the_strategy() -> None:
    strategy = build_strategy("fsdp2_rl", {"dp_shard": 3}, timeout_seconds=7.0)
    assert strategy.sizes == {"dp_replicate": 1, "dp_shard": 3}  # type: ignore[attr-defined]
    assert strategy.timeout_seconds == 7.0


def test_a_strategy_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"nonesuch_rl is not available yet. There is .*fsdp2_rl"):
        build_strategy("nonesuch_rl", {"tp": 2})
    with pytest.raises(ValueError, match="ddp is not available yet"):
        build_strategy("ddp", {"dp": 2})


def test_an_unknown_axis_names_the_known() -> None:
    with pytest.raises(ValueError, match="fsdp2_rl has no axis tp; it has dp_shard, dp_replicate"):
        build_strategy("fsdp2_rl", {"dp_shard": 2, "tp": 2})
