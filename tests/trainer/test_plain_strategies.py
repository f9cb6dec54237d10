"""Lightning's own strategies: the same numbers as FSDP2, a message on what is lost, and refusals of the others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from support.fork import run_distributed
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_ppo, toy_trainer

from lightning_rlhf.callbacks import RLCheckpoint
from lightning_rlhf.data import ListPrompts
from lightning_rlhf.modules.plain_strategies import check_strategy

SETTINGS: dict[str, Any] = {"mini_batch_size": 8, "max_rl_steps": 2, "kl_coef": 0.1}


def _fit(root: Path, model: Any, *, strategy: Any, devices: int, ppo: bool = False, **changes: Any) -> dict[str, Any]:
    recorder = Recorder()
    trainer = toy_trainer(root, callbacks=[recorder], strategy=strategy, devices=devices)
    module = (toy_ppo if ppo else toy_module)(model, **{**SETTINGS, **changes})
    trainer.fit(module, toy_data())
    found = {"steps": recorder.steps, "parameters": {k: v.numpy() for k, v in parameters_of(module).items()}}
    return {**found, "counts": (trainer.global_step, module.policy_version, module.actor.data_parallel_size)}


def _assert_same(one: dict[str, Any], other: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    assert [s["rl_step"] for s in one["steps"]] == [s["rl_step"] for s in other["steps"]]
    for a, b in zip(one["steps"], other["steps"], strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "reward/mean", "rollout/trained_tokens"):
            assert a["metrics"][name] == pytest.approx(b["metrics"][name], abs=tolerance), (a["rl_step"], name)
    for name, value in one["parameters"].items():
        assert torch.allclose(torch.tensor(value), torch.tensor(other["parameters"][name]), atol=tolerance), name


@pytest.mark.parametrize("ppo", [False, True], ids=["grpo", "ppo"])
def test_ddp_on_two_processes_gives_the_numbers_of_fsdp2(tmp_path: Path, tiny_directory: Path, ppo: bool) -> None:
    more = {"critic_mini_batch_size": 8} if ppo else {}
    runs = {
        strategy: run_distributed(
            _fit,
            2,
            tmp_path,
            tiny_directory,
            strategy=strategy,
            devices=2,
            ppo=ppo,
            init_process_group=False,
            timeout=200.0,
            **more,
        )
        for strategy in ("ddp", "fsdp2_rl")
    }
    for ddp, fsdp in zip(runs["ddp"], runs["fsdp2_rl"], strict=True):
        assert ddp["counts"][2] == 2
        assert ddp["counts"] == fsdp["counts"]
        _assert_same(ddp, fsdp)
        assert ddp["steps"][0]["tokens"] == fsdp["steps"][0]["tokens"]
    one = _fit(tmp_path, tiny_directory, strategy="auto", devices=1, ppo=ppo, **more)
    _assert_same(one, runs["ddp"][1])


def test_ddp_on_one_process_equals_auto_and_says_what_is_lost(
    tmp_path: Path, tiny_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        auto = _fit(tmp_path, tiny_directory, strategy="auto", devices=1)
    told = [record.message for record in caplog.records if "Lost against strategy='fsdp2_rl'" in record.message]
    assert len(told) == 1  # once, although there is a reference too
    assert told[0].startswith("SingleDeviceStrategy: one process hold(s) the whole model")

    def ddp() -> dict[str, Any]:
        return _fit(tmp_path, tiny_directory, strategy="ddp", devices=1)

    [result] = run_distributed(ddp, 1, init_process_group=False)
    assert result["counts"] == auto["counts"]
    _assert_same(auto, result, tolerance=0.0)


def test_a_ddp_run_resumes_from_its_one_file(tmp_path: Path, tiny_directory: Path) -> None:
    def fit(root: Path, steps: int, ckpt: str | None, strategy: str, devices: int) -> dict[str, Any]:
        recorder = Recorder()
        trainer = toy_trainer(
            root, callbacks=[recorder, RLCheckpoint(every_n_rl_steps=2)], strategy=strategy, devices=devices
        )
        module = toy_module(tiny_directory, max_rl_steps=steps)
        trainer.fit(module, toy_data(), ckpt_path=ckpt)
        return {"steps": recorder.steps, "parameters": {k: v.numpy() for k, v in parameters_of(module).items()}}

    whole = fit(tmp_path / "whole", 4, None, "auto", 1)
    root = tmp_path / "broken"
    run_distributed(fit, 2, root, 2, None, "ddp", 2, init_process_group=False, timeout=120.0)
    assert (root / "checkpoints" / "rl_step=000002.ckpt").is_file()
    resumed = run_distributed(fit, 2, root, 4, "last", "ddp", 2, init_process_group=False, timeout=120.0)
    for result in resumed:
        _assert_same({**whole, "steps": whole["steps"][2:]}, result)


def test_ddp_validates_and_tests(tmp_path: Path, tiny_directory: Path) -> None:
    def rewards() -> list[float]:
        data = toy_data(val_source=ListPrompts(["7 + 7 =", "8 + 8 ="]))
        trainer = toy_trainer(tmp_path, strategy="ddp", devices=2)
        module = toy_module(tiny_directory, max_rl_steps=1)
        validated = trainer.validate(module, data, verbose=False)[0]["val/reward"]
        tested = trainer.test(module, data, verbose=False)[0]["test/reward"]
        trainer.fit(module, data)  # goes on with the engines that validation has built
        return [validated, tested, float(module.rl_step)]

    results = run_distributed(rewards, 2, init_process_group=False, timeout=120.0)
    assert results[0] == results[1]
    assert results[0][0] == results[0][1]
    assert results[0][2] == 1


def test_a_strategy_that_cuts_the_module_itself_is_refused(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, strategy=ModelParallelStrategy())
    with pytest.raises(ValueError, match=r"strategy=ModelParallelStrategy\) cuts up the LightningModule itself.*'ddp'"):
        trainer.fit(toy_module("no model here"), toy_data())


def test_processes_by_fork_or_spawn_are_refused(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, strategy="ddp_spawn", devices=2)
    with pytest.raises(ValueError, match=r"This DDPStrategy starts processes by fork or spawn .* Use strategy='ddp'"):
        check_strategy(trainer)  # Trainer.fit would only tell from inside the processes


def test_an_engine_of_one_process_does_not_go_to_two(tmp_path: Path, tiny_directory: Path) -> None:
    """A negative control of the check between two Trainers."""
    module = toy_module(tiny_directory, max_rl_steps=1)
    toy_trainer(tmp_path).fit(module, toy_data())

    def again() -> str:
        try:
            toy_trainer(tmp_path, strategy=DDPStrategy(), devices=2).fit(module, toy_data())
        except ValueError as error:
            return str(error)
        return ""

    for message in run_distributed(again, 2, init_process_group=False):
        assert "torch back end on 1 process(es), and does not fit DDPStrategy on 2" in message
