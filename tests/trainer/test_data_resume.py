"""PromptDataModule under the real Trainer: every prompt once, also over a resume and on other numbers of ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.fork import run_distributed
from support.tiny import tiny_tokenizer
from torch import nn

from lightning_rlhf.data import JSONLPrompts, ListPrompts, Prompt, PromptDataModule
from lightning_rlhf.types import PromptBatch


class Recorder(pl.LightningModule):
    """Trains on nothing, and records the uids of each step."""

    def __init__(self, *, stop_after: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.zeros(()))
        self.tokenizer = tiny_tokenizer()
        self.stop_after = stop_after
        self.steps: list[list[str]] = []
        self.validated: list[list[str]] = []
        self.events: list[str] = []

    def configure_model(self) -> None:
        self.events.append("configure_model")

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> int | None:
        return -1 if self.stop_after is not None and len(self.steps) >= self.stop_after else None

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.weight * 1.0)
        optimizer.step()
        self.steps.append(batch.uids)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validated.append(batch.uids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def prompts(count: int) -> ListPrompts:
    return ListPrompts([Prompt(uid=f"p{index}", prompt=f"{index}+1?") for index in range(count)])


def data_module(count: int = 14, *, prompts_per_step: int = 4, **kwargs: Any) -> PromptDataModule:
    return PromptDataModule(prompts(count), prompts_per_step=prompts_per_step, seed=3, **kwargs)


def trainer(path: Path, *, epochs: int, callbacks: list[Callback] | None = None, **kwargs: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": epochs,
            "default_root_dir": path,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": bool(callbacks),
            "callbacks": callbacks,
            **kwargs,
        }
    )


def unbroken(path: Path, *, epochs: int, **kwargs: Any) -> list[list[str]]:
    module = Recorder()
    trainer(path, epochs=epochs, **kwargs).fit(module, datamodule=data_module())
    return module.steps


class SaveAfter(Callback):
    """Writes a checkpoint in a given hook, after a number of steps, and ends the run there."""

    def __init__(self, path: Path, *, steps: int, hook: str) -> None:
        self.path, self.at, self.hook = path, steps, hook

    def _maybe(self, trainer: pl.Trainer, module: Any, hook: str) -> None:
        if hook == self.hook and len(module.steps) == self.at:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._maybe(trainer, pl_module, "in_step")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self._maybe(trainer, pl_module, "batch_end")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._maybe(trainer, pl_module, "epoch_end")


def test_every_epoch_uses_whole_steps_once(tmp_path: Path) -> None:
    steps = unbroken(tmp_path, epochs=3)
    assert [len(step) for step in steps] == [4] * 9  # 14 prompts: 3 steps an epoch
    for epoch in range(3):
        seen = [uid for step in steps[3 * epoch : 3 * epoch + 3] for uid in step]
        assert len(set(seen)) == 12
    assert steps[0:3] != steps[3:6]


@pytest.mark.parametrize(
    ("hook", "at"),
    [
        *((hook, at) for hook in ("batch_end", "in_step") for at in (1, 2, 3, 4, 6, 7)),
        ("epoch_end", 3),
        ("epoch_end", 6),
    ],
)
def test_a_resumed_run_sees_what_an_unbroken_one_sees(tmp_path: Path, hook: str, at: int) -> None:
    expected = unbroken(tmp_path, epochs=3)
    path = tmp_path / "saved.ckpt"
    first = Recorder()
    trainer(tmp_path, epochs=3, callbacks=[SaveAfter(path, steps=at, hook=hook)]).fit(first, datamodule=data_module())
    assert first.steps[:at] == expected[:at]
    state = torch.load(path, weights_only=True)["PromptDataModule"]["train"]
    assert state["prompts_consumed"] == 4 * at

    second = Recorder()
    trainer(tmp_path, epochs=3).fit(second, datamodule=data_module(), ckpt_path=str(path))
    assert second.steps == expected[at:]


def test_a_limit_on_batches_loses_no_prompts(tmp_path: Path) -> None:
    expected = unbroken(tmp_path, epochs=2)
    cut = unbroken(tmp_path, epochs=3, limit_train_batches=2)  # 2 of 3 steps an epoch
    assert cut == expected


def test_resume_with_a_limit_on_batches(tmp_path: Path) -> None:
    expected = unbroken(tmp_path, epochs=2)
    path = tmp_path / "saved.ckpt"
    for at in (1, 2, 3, 4):
        trainer(tmp_path, epochs=3, limit_train_batches=2, callbacks=[SaveAfter(path, steps=at, hook="batch_end")]).fit(
            Recorder(), datamodule=data_module()
        )
        second = Recorder()
        trainer(tmp_path, epochs=3, limit_train_batches=2).fit(second, datamodule=data_module(), ckpt_path=str(path))
        assert second.steps == expected[at:6]


def test_a_batch_refused_by_the_module_is_not_consumed(tmp_path: Path) -> None:
    expected = unbroken(tmp_path, epochs=1)
    first = Recorder(stop_after=2)
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    trainer(tmp_path, epochs=1, callbacks=[saver]).fit(first, datamodule=data_module())
    assert first.steps == expected[:2]
    saved = torch.load(saver.last_model_path, weights_only=True)["PromptDataModule"]["train"]
    assert saved["prompts_consumed"] == 8


def test_a_second_trainer_starts_from_the_beginning(tmp_path: Path) -> None:
    data, steps = data_module(), []
    for _ in range(2):
        module = Recorder()
        trainer(tmp_path, epochs=1).fit(module, datamodule=data)
        steps.append(module.steps)
    assert steps[0] == steps[1] == unbroken(tmp_path, epochs=1)


def test_validating_a_checkpoint_does_not_move_a_later_fit(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    trainer(tmp_path, epochs=1, callbacks=[SaveAfter(path, steps=1, hook="batch_end")]).fit(
        Recorder(), datamodule=data_module()
    )
    data = data_module(val_source=prompts(5))
    trainer(tmp_path, epochs=1).validate(Recorder(), datamodule=data, ckpt_path=str(path), verbose=False)
    module = Recorder()
    trainer(tmp_path, epochs=1).fit(module, datamodule=data)
    assert module.steps == unbroken(tmp_path, epochs=1)


def test_validation_keeps_its_order_and_says_what_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Recorder()
    data = data_module(val_source=prompts(5), val_prompts_per_step=2)
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, epochs=2, num_sanity_val_steps=0).fit(module, datamodule=data)
    assert module.validated == [["p0", "p1"], ["p2", "p3"]] * 2
    assert "Validation leaves out the last 1 of 5 prompts" in caplog.text
    module = Recorder()
    trainer(tmp_path, epochs=1).validate(module, datamodule=data_module(val_source=prompts(3)), verbose=False)
    assert module.validated == [["p0", "p1", "p2"]]  # fewer than prompts_per_step: all in one


def test_h05_a_bad_file_stops_the_run_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n{"prompt": \n')
    module = Recorder()
    data = PromptDataModule(JSONLPrompts(path), prompts_per_step=1)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        trainer(tmp_path, epochs=1).fit(module, datamodule=data)
    assert module.events == []


def test_a_good_file_reaches_training(tmp_path: Path) -> None:
    path = tmp_path / "good.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}", "answer": {i}}}\n' for i in range(4)))
    module = Recorder()
    trainer(tmp_path, epochs=1).fit(module, datamodule=PromptDataModule(JSONLPrompts(path), prompts_per_step=2))
    assert sorted(uid for step in module.steps for uid in step) == [f"good.jsonl:{i}" for i in (1, 2, 3, 4)]


def test_e03_overlong_prompts_follow_the_stated_rule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = ListPrompts([Prompt(uid=uid, prompt=text) for uid, text in (("a", "1"), ("b", "1234567"), ("c", "2"))])
    with caplog.at_level(logging.WARNING):
        module = Recorder()
        data = PromptDataModule(source, prompts_per_step=1, max_prompt_tokens=6, overlong="drop", shuffle=False)
        trainer(tmp_path, epochs=1).fit(module, datamodule=data)
    assert module.steps == [["a"], ["c"]]
    assert data.length_reports["train"].dropped == ["b"]
    assert "train prompts: dropped 1 of 3, longer than max_prompt_tokens=6 (b)" in caplog.text
    for rule, message in (("error", "Prompt 'b': 10 tokens, but max_prompt_tokens=6"), ("drop", "All 3 train prompts")):
        data = PromptDataModule(
            source, prompts_per_step=1, max_prompt_tokens=6 if rule == "error" else 2, overlong=rule
        )
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, epochs=1).fit(Recorder(), datamodule=data)


def test_settings_that_would_break_the_position_are_refused(tmp_path: Path) -> None:
    for kwargs in ({"reload_dataloaders_every_n_epochs": 1}, {"overfit_batches": 1}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            trainer(tmp_path, epochs=1, **kwargs).fit(Recorder(), datamodule=data_module())
    with pytest.raises(ValueError, match="overlong must be one of error, drop, truncate_left, got 'cut'"):
        data_module(overlong="cut")
    with pytest.raises(RuntimeError, match="no tokenizer and no trainer"):
        data_module().setup("fit")


def _fit_on_a_rank(
    path: Path, *, checkpoint: Path | None, save: Path | None, prompts_per_step: int = 4
) -> list[list[str]]:
    module = Recorder()
    callbacks: list[Callback] = [SaveAfter(save, steps=2, hook="batch_end")] if save else []
    trainer(path, epochs=2, devices=2, strategy="ddp", callbacks=callbacks).fit(
        module, datamodule=data_module(prompts_per_step=prompts_per_step), ckpt_path=checkpoint and str(checkpoint)
    )
    return module.steps


def test_two_ranks_share_each_step_and_resume_to_and_from_one(tmp_path: Path) -> None:
    expected = unbroken(tmp_path, epochs=2)
    from_two = tmp_path / "two.ckpt"
    shares = run_distributed(_fit_on_a_rank, 2, tmp_path, checkpoint=None, save=from_two, init_process_group=False)
    assert [a + b for a, b in zip(*shares, strict=True)] == expected[:2]

    module = Recorder()
    trainer(tmp_path, epochs=2).fit(module, datamodule=data_module(), ckpt_path=str(from_two))
    assert module.steps == expected[2:]

    from_one = tmp_path / "one.ckpt"
    trainer(tmp_path, epochs=2, callbacks=[SaveAfter(from_one, steps=2, hook="batch_end")]).fit(
        Recorder(), datamodule=data_module()
    )
    shares = run_distributed(_fit_on_a_rank, 2, tmp_path, checkpoint=from_one, save=None, init_process_group=False)
    assert [a + b for a, b in zip(*shares, strict=True)] == expected[2:]


def test_g02_and_ranks_with_different_prompts_are_errors(tmp_path: Path) -> None:
    def odd_step() -> None:
        with pytest.raises(ValueError, match="prompts_per_step=5 cannot be shared equally by 2"):
            _fit_on_a_rank(tmp_path, checkpoint=None, save=None, prompts_per_step=5)

    run_distributed(odd_step, 2, init_process_group=False)

    def different() -> str:
        data = PromptDataModule(prompts(4 + int(os.environ["RANK"])), prompts_per_step=2)
        run = trainer(tmp_path, epochs=1, devices=2, strategy="ddp")
        run.strategy.setup_environment()
        run.strategy._lightning_module = Recorder()
        data.trainer = run
        try:
            data.setup("fit")
        except RuntimeError as error:
            return str(error)
        return "no error"

    first, second = run_distributed(different, 2, init_process_group=False)
    assert first == "no error"
    assert "The train prompts of rank 1 differ from those of rank 0" in second
