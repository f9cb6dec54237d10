"""Rollout and weight sync that do not go together: refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import write_tiny_model
from support.toy import toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import HFRollout, VLLMRollout, WeightSync


@pytest.mark.parametrize("rollout", [HFRollout, VLLMRollout])
def test_an_engine_for_other_processes_has_none_to_send_to(tmp_path: Path, rollout: type[HFRollout]) -> None:
    write_tiny_model(tmp_path / "tiny", layers=1)
    module = toy_module(tmp_path / "tiny", max_rl_steps=1)
    trainer = toy_trainer(tmp_path, rollout=rollout(), weight_sync=False, callbacks=[WeightSync(engine="shm")])
    with pytest.raises(ValueError, match=r"ShmCheckpointEngine carries weights to other processes.*engine='naive'"):
        trainer.fit(module, toy_data())
    assert not module.has_engines()
