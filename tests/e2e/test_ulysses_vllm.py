"""GRPO with sequence parallelism and the real vLLM in every rank: one group, one set of rollouts and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import Recorder, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import VLLMRollout
from lightning_rlhf.strategies import UlyssesRLStrategy


class _Rewards(Recorder):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.steps[-1]["rewards"] = batch.rollouts.rewards.tolist()


def _fit(root: Path, model: Path) -> list[dict[str, Any]]:
    recorder = _Rewards()
    rollout = VLLMRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64, max_num_seqs=16, kv_cache_bytes=16 << 20)
    trainer = toy_trainer(root, callbacks=[recorder], rollout=rollout, strategy=UlyssesRLStrategy(sp_size=2), devices=2)
    trainer.fit(toy_module(model, max_rl_steps=3), toy_data())
    return recorder.steps


def test_the_ranks_of_a_group_hold_identical_rollouts_and_rewards(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny", family="llama")
    first, second = run_distributed(_fit, 2, tmp_path, directory, init_process_group=False, timeout=240.0)
    assert len(first) == len(second) == 3
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        assert len(one["uids"]) == 4
        for name in ("uids", "tokens", "rewards", "versions"):
            assert one[name] == other[name], name
        assert one["versions"] == [index]
        assert len(one["rewards"]) == 16
        # sampled with the weights that the trainer has now, whichever of the two has sampled a row
        assert one["metrics"]["actor/mismatch_abs_max"] < 1e-5
        for name in ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/num_tokens"):
            assert one["metrics"][name] == other["metrics"][name], name
