"""The parity command on megatron's layouts: right ones pass, and each kind of mistake is caught."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist
from support.megatron_imports import megatron_is_imported  # noqa: F401
from torch import Tensor

from lightning_rlhf.cli import main
from lightning_rlhf.engines.megatron import data_parallel, engine_model, model, packed
from lightning_rlhf.engines.megatron import heads as megatron_heads
from lightning_rlhf.parity.run import TOLERANCE

OVERLAP = ("distributed_optimizer=true", "overlap_grad_reduce=true", "overlap_param_gather=true")


def _parity(capfd: pytest.CaptureFixture[str], layout: str, name: str, *options: str) -> tuple[int, dict[str, Any]]:
    arguments = ["parity", "--strategy", "megatron_rl", "--layout", layout, "--model", name, "--json"]
    more = [word for option in options for word in ("--option", option)]
    status = main.main([*arguments, *more])
    report: dict[str, Any] = json.loads(capfd.readouterr().out)
    return status, report


@pytest.mark.parametrize(
    ("layout", "name", "options"),
    [
        ("tp=2", "tiny-qwen3-tied", ()),
        ("tp=2,sp=1", "tiny-llama", ()),
        ("tp=4", "tiny-qwen3", ()),  # C05: its 2 key-value heads are fewer than the ranks
        ("tp=4,sp=1", "tiny-qwen3", ()),
        ("pp=2", "tiny-qwen3", ()),
        ("pp=4", "tiny-qwen3-tied-deep", ()),
        ("pp=2,vpp=2", "tiny-qwen3-deep", ()),
        ("cp=2", "tiny-qwen3", ()),
        ("cp=2", "tiny-qwen3", ("context_parallel_attention=ulysses",)),
        ("cp=2", "tiny-qwen3", ("context_parallel_attention=ring",)),
        ("cp=4", "tiny-llama", ()),
        ("cp=4", "tiny-qwen3", ("context_parallel_attention=ulysses",)),
        ("cp=4", "tiny-qwen3", ("context_parallel_attention=ring",)),
        ("ep=2", "tiny-qwen3-moe", ()),
        ("ep=2", "tiny-qwen3-moe", ("moe_dispatcher=allgather",)),
        ("ep=2,pp=2", "tiny-qwen3-moe", ("moe_dispatcher=allgather",)),
        ("tp=2,sp=1,ep=2,etp=2", "tiny-qwen3-moe", ()),
        ("tp=2,sp=1,ep=2,etp=1", "tiny-qwen3-moe", ("recompute=full",)),
        ("dp=2", "tiny-qwen3", ("distributed_optimizer=true",)),
        ("dp=2,tp=2", "tiny-qwen3", OVERLAP),
        ("ep=2", "tiny-qwen3-moe", OVERLAP),
        ("tp=2,pp=2,dp=2", "tiny-qwen3", ()),
        ("tp=2,sp=1,cp=2,pp=2", "tiny-qwen3-tied", ()),
        ("ep=4,cp=2,tp=2,sp=1,pp=2,etp=1", "tiny-qwen3-moe", ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_layouts_equal_one_process(
    capfd: pytest.CaptureFixture[str], layout: str, name: str, options: tuple[str, ...]
) -> None:
    """Dynamic micro-batches against one that holds all rows: log-probs, loss, gradients, norm, three steps, export."""
    status, report = _parity(capfd, layout, name, *options)
    assert status == 0, report
    assert report["first_divergence"] is None
    assert all(0 <= difference <= TOLERANCE for difference in report["max_abs_diff"].values())
    assert report["max_abs_diff"]["log_probs"] > 0


def _caught(capfd: pytest.CaptureFixture[str], layout: str, name: str = "tiny-qwen3") -> tuple[dict[str, float], str]:
    status, report = _parity(capfd, layout, name)
    assert status == 1
    return report["max_abs_diff"], report["first_divergence"]


def test_c01_negative_control_a_norm_weight_without_its_mark(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under sequence parallelism each rank's part of a norm's gradient is of its own tokens."""
    build = engine_model.build_model

    def unmarked(*args: Any, **kwargs: Any) -> Any:
        chunks = build(*args, **kwargs)
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            if getattr(parameter, "sequence_parallel", False):
                parameter.sequence_parallel = False  # type: ignore[attr-defined]
        return chunks

    monkeypatch.setattr(engine_model, "build_model", unmarked)
    differences, first = _caught(capfd, "tp=2,sp=1")
    assert differences["log_probs"] <= TOLERANCE
    assert "norm.weight" in first


def test_c03_negative_control_an_all_reduce_in_the_gathers_backward(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each context-parallel rank computes the whole loss, and counts it once."""
    right = packed._GatherForAll.backward

    def summed(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total)
        own: tuple[Tensor, None] = right(ctx, total)
        return own

    monkeypatch.setattr(packed._GatherForAll, "backward", staticmethod(summed))
    differences, _ = _caught(capfd, "cp=2")
    assert differences["log_probs"] <= TOLERANCE
    assert differences["grads"] > 1e-2


def test_c07_negative_control_contiguous_pieces(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data cut into contiguous pieces, attention that expects zigzag ones."""
    import torch

    def contiguous(lengths: Tensor, size: int) -> Tensor:
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        everything = torch.arange(int(lengths.sum()))
        return torch.argsort((everything - starts) // torch.repeat_interleave(lengths // size, lengths), stable=True)

    monkeypatch.setattr(packed, "zigzag", contiguous)
    differences, _ = _caught(capfd, "cp=2")
    assert differences["log_probs"] > 1e-2


def test_e10_negative_control_padding_in_the_softmax(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is padded to a multiple of tp, and padding counts as tokens."""
    right = megatron_heads.vocab_parallel_log_probs

    def with_padding(*args: Any, vocab_size: int, **kwargs: Any) -> Any:
        return right(*args, vocab_size=vocab_size + 32, **kwargs)

    monkeypatch.setattr(megatron_heads, "vocab_parallel_log_probs", with_padding)
    monkeypatch.setattr(model, "padded_vocab_size", lambda vocab_size, layout: vocab_size + 32)
    differences, _ = _caught(capfd, "tp=2")
    assert differences["log_probs"] > 1e-2


def test_negative_control_gradients_that_data_parallel_ranks_keep(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def own_alone(*args: Any, **kwargs: Any) -> None:
        pass

    wrap = data_parallel.wrap

    def unsynced(chunks: Any, options: Any) -> Any:
        wrapped = wrap(chunks, options)
        for chunk in wrapped:
            monkeypatch.setattr(chunk, "finish_grad_sync", own_alone)
        return wrapped

    monkeypatch.setattr(engine_model, "wrap", unsynced)
    differences, _ = _caught(capfd, "dp=2")
    assert differences["log_probs"] <= TOLERANCE
    assert differences["grads"] > 1e-2
