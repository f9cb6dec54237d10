"""The parity command over real processes: layouts that are right pass, and each kind of mistake is caught."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_rlhf.cli import main
from lightning_rlhf.engines import fsdp2
from lightning_rlhf.engines.fsdp2 import FSDP2Engine
from lightning_rlhf.metrics import Metric
from lightning_rlhf.parity.run import TOLERANCE

QUANTITIES = ["log_probs", "loss", "grads", "params", "export"]


def _parity(capfd: pytest.CaptureFixture[str], layout: str, model: str, *more: str) -> tuple[int, dict[str, Any]]:
    status = main.main(["parity", "--strategy", "fsdp2_rl", "--layout", layout, "--model", model, "--json", *more])
    out = capfd.readouterr().out
    report: dict[str, Any] = json.loads(out)
    assert list(report) == ["strategy", "layout", "max_abs_diff", "first_divergence", "seconds"]
    assert list(report["max_abs_diff"]) == QUANTITIES
    return status, report


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp_shard=2", "tiny-qwen3"),
        ("dp_shard=2", "tiny-qwen3-moe"),
        ("dp_shard=4", "tiny-llama"),
        ("dp_replicate=2,dp_shard=2", "tiny-qwen3-tied"),
    ],
)
def test_layouts_equal_one_process(capfd: pytest.CaptureFixture[str], layout: str, model: str) -> None:
    status, report = _parity(capfd, layout, model)
    assert status == 0
    assert (report["strategy"], report["layout"], report["first_divergence"]) == ("fsdp2_rl", layout, None)
    assert all(0 <= difference <= TOLERANCE for difference in report["max_abs_diff"].values())
    # another order of sums: exact zeros everywhere would mean that one side was compared with itself
    assert report["max_abs_diff"]["log_probs"] > 0


def test_the_table_names_what_was_compared(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main.main(["parity", "--strategy", "fsdp2_rl", "--layout", "dp_shard=1"]) == 0
    out = capfd.readouterr().out
    assert "fsdp2_rl dp_shard=1 against one process, fp32 on" in out
    assert out.count("equal") == len(QUANTITIES)
    assert "default eps 1e-08" in out
    assert "not gated" in out


def _caught(capfd: pytest.CaptureFixture[str], layout: str = "dp_shard=2") -> dict[str, Any]:
    status, report = _parity(capfd, layout, "tiny-qwen3")
    assert status == 1
    assert report["first_divergence"] is not None
    return report


def _within(report: dict[str, Any], *quantities: str) -> bool:
    return all(report["max_abs_diff"][quantity] <= TOLERANCE for quantity in quantities)


def test_negative_control_a_wrong_gradient_scale(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp2, "sum_gradients", lambda model: None)  # gradients are averaged over ranks
    report = _caught(capfd)
    assert _within(report, "log_probs")
    assert report["max_abs_diff"]["grads"] > 1e-2
    assert report["first_divergence"] == "grads: model.embed_tokens.weight"


def test_negative_control_a_metric_summed_wrongly(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = FSDP2Engine.forward_backward_batch

    def twice(self: FSDP2Engine, *args: Any, **kwargs: Any) -> dict[str, Metric]:
        metrics = right(self, *args, **kwargs)
        return {**metrics, "loss": metrics["loss"].merge(metrics["loss"])}

    monkeypatch.setattr(FSDP2Engine, "forward_backward_batch", twice)
    report = _caught(capfd)
    assert _within(report, "log_probs", "grads", "params", "export")
    assert report["first_divergence"] == "loss: loss"


def test_negative_control_a_dropped_shard_of_a_gradient(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def drop(self: FSDP2Engine) -> None:
        gradient = self.causal_lm.get_parameter(name).grad
        assert isinstance(gradient, DTensor)
        if self.data_parallel_rank == 1:
            gradient.to_local().zero_()

    monkeypatch.setattr(FSDP2Engine, "finish_gradients", drop)
    report = _caught(capfd)
    assert _within(report, "log_probs")
    assert report["first_divergence"] == f"grads: {name}"


def test_negative_control_a_dropped_shard_of_the_export(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    right = FSDP2Engine.get_per_tensor_param

    def drop(self: FSDP2Engine) -> Iterator[tuple[str, Tensor]]:
        for key, tensor in right(self):
            half = tensor.shape[0] // 2
            yield key, torch.cat([tensor[:half], torch.zeros_like(tensor[half:])]) if key == name else tensor

    monkeypatch.setattr(FSDP2Engine, "get_per_tensor_param", drop)
    report = _caught(capfd)
    assert _within(report, "log_probs", "loss", "grads", "params")
    assert report["first_divergence"] == f"export: {name}"


def test_negative_control_replicas_that_drift(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = FSDP2Engine.optimizer_step

    def drift(self: FSDP2Engine) -> Any:
        result = right(self)
        if self.mesh.get_coordinate()[0] == 1:  # type: ignore[index]
            for parameter in self.module.parameters():
                parameter.detach().to_local().add_(1e-3)  # type: ignore[attr-defined]
        return result

    monkeypatch.setattr(FSDP2Engine, "optimizer_step", drift)
    report = _caught(capfd, "dp_replicate=2,dp_shard=1")
    assert _within(report, "log_probs", "grads")
    assert report["first_divergence"] == "params: model.embed_tokens.weight"


def test_what_cannot_be_compared_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fsdp2_rl = ["parity", "--strategy", "fsdp2_rl", "--layout"]
    for arguments, message in (
        (["parity", "--strategy", "nonesuch_rl", "--layout", "tp=2"], "nonesuch_rl is not available yet"),
        ([*fsdp2_rl, "tp=2"], "fsdp2_rl has no axis tp"),
        ([*fsdp2_rl, "dp_shard"], "cannot read 'dp_shard'"),
        ([*fsdp2_rl, "dp_shard=2", "--micro-batch-tokens", "39"], "39 is below 40, the longest sequence"),
        ([*fsdp2_rl, "dp_shard=2", "--model", str(tmp_path / "nothing")], "neither one of tiny-qwen3"),
    ):
        assert main.main(arguments) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("lightning-rlhf parity: ")
        assert message in captured.err


def test_a_rank_that_fails_is_reported(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FSDP2Engine, model: object) -> None:
        raise RuntimeError("no memory for the shard")

    monkeypatch.setattr(FSDP2Engine, "place", fail)
    assert main.main(["parity", "--strategy", "fsdp2_rl", "--layout", "dp_shard=2", "--json"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "RuntimeError: no memory for the shard" in captured.err
