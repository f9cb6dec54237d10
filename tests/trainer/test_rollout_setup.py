"""Rollout and weight sync that do not go together, and some that do."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from support.tiny import write_tiny_model
from support.toy import toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import HFRollout, VLLMRollout, WeightSync
from lightning_rlhf.contracts.rollout import RolloutEngine
from lightning_rlhf.rollout.hf import HFReferenceEngine


@pytest.mark.parametrize("rollout", [HFRollout, VLLMRollout])
def test_an_engine_for_other_processes_has_none_to_send_to(tmp_path: Path, rollout: type[HFRollout]) -> None:
    write_tiny_model(tmp_path / "tiny", layers=1)
    module = toy_module(tmp_path / "tiny", max_rl_steps=1)
    trainer = toy_trainer(tmp_path, rollout=rollout(), weight_sync=False, callbacks=[WeightSync(engine="shm")])
    with pytest.raises(ValueError, match=r"ShmCheckpointEngine carries weights to other processes.*engine='naive'"):
        trainer.fit(module, toy_data())
    assert not module.has_engines()


class Bf16Rollout(HFRollout):
    """Samples in bf16, whatever the trainer computes in."""

    says: torch.dtype = torch.bfloat16

    def build_engine(self, trainer: pl.Trainer, model_directory: str | Path) -> RolloutEngine:
        engine = HFReferenceEngine(model_directory, dtype=torch.bfloat16, max_model_len=self.max_model_len)
        engine._dtype = self.says
        return engine


class SilentBf16Rollout(Bf16Rollout):
    says = torch.float32


@pytest.mark.parametrize("rollout", [Bf16Rollout, SilentBf16Rollout])
def test_a_rollout_engine_in_bf16_beside_a_trainer_in_fp32(tmp_path: Path, rollout: type[HFRollout]) -> None:
    write_tiny_model(tmp_path / "tiny", layers=1)
    sync = WeightSync()
    sampler = rollout(num_rollouts=2, max_new_tokens=4, max_model_len=64)
    trainer = toy_trainer(tmp_path, rollout=sampler, weight_sync=False, callbacks=[sync])
    module = toy_module(tmp_path / "tiny", max_rl_steps=1)
    if rollout is SilentBf16Rollout:  # rounding is taken for a stale weight where nobody knows of it
        with pytest.raises(RuntimeError, match=r"differ by .* nats on the probe"):
            trainer.fit(module, toy_data())
        return
    trainer.fit(module, toy_data())
    assert sync.last_receipt is not None
    assert 1e-2 < sync.last_receipt.probe_difference < 1.0
