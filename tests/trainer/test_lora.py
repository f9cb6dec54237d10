"""GRPO with an adapter: the rollout engine gets merged weights, the reference is the base, resume is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.fork import run_distributed
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_trainer
from transformers import AutoModelForCausalLM

import lightning_rlhf as rl
from lightning_rlhf.cli.export import export

LORA = rl.LoRAConfig(rank=4, alpha=8.0)


def _run(root: Path, model: Path, strategy: Any = "auto", *, steps: int = 3, **kwargs: Any) -> tuple[Any, Recorder]:
    recorder = Recorder()
    module = toy_module(str(model), lora=LORA, kl_coef=0.1, max_rl_steps=steps)
    trainer = toy_trainer(
        root, callbacks=[recorder, rl.RLCheckpoint(every_n_rl_steps=1, save_top_k=-1), rl.HFExport()], strategy=strategy
    )
    trainer.fit(module, toy_data(), **kwargs)
    return module, recorder


@pytest.mark.parametrize("strategy", ["auto", "fsdp2_rl"])
def test_it_learns_against_its_own_base_and_resumes(tmp_path: Path, tiny_directory: Path, strategy: str) -> None:
    run_distributed(_learn_and_resume, 1, tmp_path, tiny_directory, strategy, init_process_group=False, timeout=120)


def _learn_and_resume(tmp_path: Path, tiny_directory: Path, strategy: str) -> None:
    module, recorder = _run(tmp_path, tiny_directory, strategy)
    first, last = (step["metrics"] for step in (recorder.steps[0], recorder.steps[-1]))
    assert first["actor/ref_kl"] == pytest.approx(0.0, abs=1e-7), "the adapter starts at nothing"
    assert last["actor/ref_kl"] > 1e-6
    # the rollout engine has what training has: its log-probs are those of merged weights
    assert all(abs(step["metrics"]["actor/mismatch_abs_max"]) < 1e-4 for step in recorder.steps)
    assert module._reference is None, "no second model"
    mine = parameters_of(module)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for name, value in written.named_parameters():
        assert torch.equal(value, mine[name]), name
    again, resumed = _run(tmp_path / "again", tiny_directory, strategy, steps=3, ckpt_path=_after(tmp_path, 2))
    assert [step["rl_step"] for step in resumed.steps] == [3]
    for name, value in parameters_of(again).items():
        assert torch.equal(value, mine[name]), name
    export(Path(_after(tmp_path, 3)), out=tmp_path / "exported", model=str(tiny_directory))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    for name, value in exported.named_parameters():
        assert torch.equal(value, mine[name]), name
    export(Path(_after(tmp_path, 3)), out=tmp_path / "adapter", model=str(tiny_directory), adapter=True)
    base = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    for name, value in theirs.named_parameters():
        torch.testing.assert_close(value.detach(), mine[name], atol=1e-7, rtol=0)


def _after(root: Path, rl_step: int) -> str:
    (found,) = (path for path in (root / "checkpoints").glob("*.ckpt") if int(path.stem.split("=")[1]) == rl_step)
    return str(found)


def test_a_reference_that_moves_is_refused() -> None:
    with pytest.raises(ValueError, match="reference_every=2 moves a reference, but with lora"):
        toy_module("anywhere", lora=LORA, kl_coef=0.1, reference_every=2)
