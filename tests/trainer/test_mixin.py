"""GRPO in a team's own LightningModule: GRPO's numbers, their hooks and names, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.fork import run_distributed
from support.toy import Recorder, digit_reward, parameters_of, toy_data, toy_module, toy_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.callbacks import RLCheckpoint
from lightning_rlhf.modules import GRPOMixin
from lightning_rlhf.modules.mixin import single_optimizer


class Theirs(pl.LightningModule):
    """Builds its model in configure_model, and keeps a list of the hooks that ran."""

    def __init__(self, directory: str, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: Any = None
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.ran: list[str] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.hparams.directory, dtype=torch.float32)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("their step, where RL's is meant")

    def on_fit_start(self) -> None:
        self.ran.append("fit_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ran.append("batch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["theirs"] = "kept"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.ran.append(f"loaded {checkpoint['theirs']}")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, eps=1e-4, weight_decay=0.0)


class WithRL(GRPOMixin, Theirs):
    def rl_arguments(self) -> dict[str, Any]:
        return {"reward": digit_reward, "max_rl_steps": 2, "kl_coef": 0.1}


def _fit(root: Path, module: Any, *, strategy: str = "auto", devices: int = 1, ckpt: str | None = None) -> Any:
    recorder = Recorder()
    callbacks = [recorder, RLCheckpoint(every_n_rl_steps=1)]
    trainer = toy_trainer(root, callbacks=callbacks, strategy=strategy, devices=devices)
    trainer.fit(module, toy_data(), ckpt_path=ckpt)
    parameters = {name: tensor.numpy() for name, tensor in parameters_of(module).items()}
    return [step["metrics"]["actor/loss"] for step in recorder.steps], parameters


def _assert_same(one: Any, other: Any) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-5)
    for name, value in one[1].items():
        assert torch.allclose(torch.tensor(value), torch.tensor(other[1][name]), atol=1e-5), name


def test_it_is_grpo_with_their_hooks_and_resumes(tmp_path: Path, tiny_directory: Path) -> None:
    plain = _fit(tmp_path / "grpo", toy_module(tiny_directory, max_rl_steps=2, kl_coef=0.1))
    module = WithRL(str(tiny_directory))
    _assert_same(plain, _fit(tmp_path / "mixin", module))
    assert module.ran == ["fit_start", "batch_end", "batch_end"]
    assert module.hparams.lr == 3e-3

    resumed = WithRL(str(tiny_directory), lr=1e-3)
    resumed.max_rl_steps = 3
    losses, _ = _fit(tmp_path / "mixin", resumed, ckpt="last")
    assert len(losses) == 1
    assert resumed.ran == ["loaded kept", "fit_start", "batch_end"]


def test_fsdp2_shards_their_model_and_saves_it_once(tmp_path: Path, tiny_directory: Path) -> None:
    plain = _fit(tmp_path / "grpo", toy_module(tiny_directory, max_rl_steps=2, kl_coef=0.1))

    def sharded(root: Path, steps: int, ckpt: str | None) -> Any:
        module = WithRL(str(tiny_directory))
        module.max_rl_steps = steps
        return _fit(root, module, strategy="fsdp2_rl", devices=2, ckpt=ckpt)

    root = tmp_path / "mixin"
    for result in run_distributed(sharded, 2, root, 2, None, init_process_group=False, timeout=120.0):
        _assert_same(plain, result)
    saved = torch.load(root / "checkpoints" / "rl_step=000002.ckpt" / "trainer.pt", weights_only=True)
    assert saved["state_dict"] == {}  # the actor's folder holds the model, under whichever name
    for losses, _ in run_distributed(sharded, 2, root, 3, "last", init_process_group=False, timeout=120.0):
        assert len(losses) == 1


def test_a_name_that_both_use_is_refused(tiny_directory: Path) -> None:
    class Clash(Theirs):
        def __init__(self, directory: str) -> None:
            super().__init__(directory)
            self.seed = 7

    class ClashWithRL(GRPOMixin, Clash):
        def rl_arguments(self) -> dict[str, Any]:
            return {"reward": digit_reward}

    with pytest.raises(ValueError, match=r"ClashWithRL and GRPO both keep something under self\.seed\. Rename it"):
        ClashWithRL(str(tiny_directory))


def test_an_optimizer_that_leaves_parameters_out_is_refused(tmp_path: Path, tiny_directory: Path) -> None:
    class HeadOnly(Theirs):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.lm_head.parameters(), lr=1e-3)

    class HeadWithRL(GRPOMixin, HeadOnly):
        def rl_arguments(self) -> dict[str, Any]:
            return {"reward": digit_reward}

    with pytest.raises(ValueError, match=r"configure_optimizers leaves out \d+ trained parameter"):
        _fit(tmp_path, HeadWithRL(str(tiny_directory)))


def test_configure_optimizers_in_each_form() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    stepped = {"scheduler": schedule, "interval": "step"}
    assert single_optimizer(optimizer) == (optimizer, None)
    assert single_optimizer([optimizer]) == (optimizer, None)
    assert single_optimizer(([optimizer], [stepped])) == (optimizer, schedule)
    assert single_optimizer({"optimizer": optimizer, "lr_scheduler": stepped}) == (optimizer, schedule)
    assert single_optimizer([{"optimizer": optimizer, "lr_scheduler": stepped}]) == (optimizer, schedule)
    with pytest.raises(ValueError, match="interval='epoch'"):
        single_optimizer(([optimizer], [schedule]))
    with pytest.raises(ValueError, match="returned 2 optimizers"):
        single_optimizer([optimizer, optimizer])
    with pytest.raises(ValueError, match="expected a torch optimizer"):
        single_optimizer(None)
