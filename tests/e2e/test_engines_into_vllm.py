"""Every checkpoint engine into real vLLM: after a push the replicas' log-probs are the trainer's, in any layout."""

from __future__ import annotations

import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.megatron_imports import megatron_is_imported  # noqa: F401 (a fixture)
from support.replicas import steps_with_two_workers
from support.rollout import largest_difference, perturb, prompt_batch
from support.sharded import CPU, engine_config
from support.tiny import tiny_model, write_tiny_model

from lightning_rlhf.callbacks import WeightSync
from lightning_rlhf.callbacks.served_replicas import replicas_of
from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.contracts.rollout import SamplingConfig
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.rollout.replica_process import ReplicaConfig
from lightning_rlhf.rollout.served import ServedRolloutEngine
from lightning_rlhf.strategies import FSDP2RLStrategy, MegatronRLStrategy, UlyssesRLStrategy
from lightning_rlhf.weights import CheckpointEngineManager

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

CARRIERS = ["shm", "nccl", "nixl", "delta", "disk"]
NIXL_ON_LOOPBACK = {"NIXL_LOG_LEVEL": "ERROR", "UCX_TLS": "posix,self,cma,tcp", "UCX_NET_DEVICES": "lo"}
PROMPTS = prompt_batch({f"p{i}": [5 + (i + j) % 50 for j in range(3 + i % 4)] for i in range(4)})
SAMPLING = SamplingConfig(n=2, max_new_tokens=12)


@pytest.mark.parametrize(
    ("tensor_parallel_size", "replicas", "tied"),
    [
        pytest.param(2, 1, True, id="tp2-tied"),
        pytest.param(1, 2, False, id="two-replicas-untied"),
        pytest.param(2, 1, False, id="tp2-untied", marks=pytest.mark.slow),
        pytest.param(1, 2, True, id="two-replicas-tied", marks=pytest.mark.slow),
    ],
)
def test_d04_log_probs_after_two_pushes_by_each_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int, replicas: int, tied: bool
) -> None:
    """The same replicas take all of them in turn, so that what one leaves stale the next does not hide."""
    for name, value in NIXL_ON_LOOPBACK.items():
        monkeypatch.setenv(name, value)
    path = write_tiny_model(tmp_path / "model", tied=tied, seed=7)

    def run() -> dict[str, list[tuple[float, float, int]]]:
        trainer = TorchEngine(engine_config(tied=tied), device=CPU)
        trainer.initialize()
        one = ReplicaConfig(
            model=str(path),
            max_model_len=64,
            kv_cache_bytes=32 << 20,
            max_num_seqs=16,
            num_threads=1,
            tensor_parallel_size=tensor_parallel_size,
        )
        served = ServedRolloutEngine(path, max_model_len=64, fleet_configs=[one] * replicas)
        try:
            found = {name: _two_pushes(name, trainer, served, tmp_path, tied=tied) for name in CARRIERS}
            if replicas == 1:
                _kill_the_only_one(served)
                found["after its death"] = _two_pushes("shm", trainer, served, tmp_path, tied=tied)
            return found
        finally:
            served.shutdown()

    (found,) = run_distributed(run, 1, init_process_group=False, timeout=400.0)
    for name, pushes in found.items():
        assert [workers for *_, workers in pushes] == [2, 2], name  # processes that received
        for new, old, _ in pushes:
            assert new < 1e-5, name
            assert old > 1e-2, "the weights hardly move: this test shows nothing"


def _two_pushes(
    name: str, trainer: TorchEngine, served: ServedRolloutEngine, folder: Path, *, tied: bool
) -> list[tuple[float, float, int]]:
    special = {"disk": {"folder": str(folder / "disk")}}
    carrier = CheckpointEngineRegistry.new(name, bucket_bytes=40_000, timeout=20.0, **special.get(name, {}))
    manager = CheckpointEngineManager(
        engine=trainer,
        checkpoint_engine=carrier,
        probe_token_ids=[5, 9, 3, 20],
        probe_tolerance=1e-4,
    )
    model = tiny_model(tied=tied).eval()
    found = []
    for push in range(2):
        before = {key: value.clone() for key, value in trainer.get_per_tensor_param()}
        perturb(trainer.module, seed=CARRIERS.index(name) * 2 + push, scale=0.3)
        manager.replicas = replicas_of(served)
        receipt = manager.update_weights(10 * CARRIERS.index(name) + push)
        assert receipt.tensors_compared > 0
        served.expect_version(receipt.version)
        rollouts = served.generate(PROMPTS, SAMPLING, rl_step=push)
        assert set(rollouts.token_versions[rollouts.response_mask].tolist()) == {receipt.version}
        differences = []
        for state in (dict(trainer.get_per_tensor_param()), before):
            model.load_state_dict(state, strict=False)
            model.tie_weights()
            differences.append(largest_difference(model, rollouts))
        workers = sum(len(replica.receiver_ids) for replica in manager.replicas)
        found.append((differences[0], differences[1], workers))
    carrier.close()
    return found


def _kill_the_only_one(served: ServedRolloutEngine) -> None:
    """It starts again, without weights: the rollout ends at once, and says when there will be some."""
    assert served._fleet is not None
    victim, begun = served._fleet.pids[0], time.monotonic()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="started again gets its weights at the next push, which cannot come while"):
        served.generate(PROMPTS, SAMPLING, rl_step=0)
    assert served._fleet.pids[0] != victim
    served.expect_version(99)  # of a push that it was not there for: it must not serve what it was started with
    with pytest.raises(RuntimeError, match="its weights are of version None, wanted is 99"):
        served.generate(PROMPTS, SAMPLING, rl_step=0)
    assert time.monotonic() - begun < 60.0  # of 300 that it may take to start


LAYOUTS: dict[str, Any] = {
    "fsdp2": FSDP2RLStrategy,
    "ulysses": lambda: UlyssesRLStrategy(sp_size=2),
    "megatron-tp2": lambda: MegatronRLStrategy(tensor_parallel_size=2),
    "megatron-pp2": lambda: MegatronRLStrategy(pipeline_parallel_size=2),
}
# fsdp2 with shm is in test_grpo_served
QUICK = {("ulysses", "nixl"), ("megatron-tp2", "shm"), ("megatron-pp2", "nccl")}


@pytest.mark.parametrize(
    ("layout", "carrier"),
    [
        pytest.param(layout, carrier, marks=() if (layout, carrier) in QUICK else pytest.mark.slow)
        for layout in LAYOUTS
        for carrier in CARRIERS
    ],
)
@pytest.mark.usefixtures("megatron_is_imported")
def test_what_replicas_sample_is_what_the_trainer_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, carrier: str
) -> None:
    """Two trainer ranks of each layout feed a replica of two workers (tensor parallel) after each optimizer step."""
    for name, value in NIXL_ON_LOOPBACK.items():
        monkeypatch.setenv(name, value)
    special = {"disk": {"folder": str(tmp_path / "disk")}}
    tied = layout in ("fsdp2", "megatron-tp2")
    directory = write_tiny_model(tmp_path / "model", family="llama", tied=tied)

    def fit() -> list[dict[str, Any]]:
        sync = WeightSync(engine=carrier, engine_kwargs=special.get(carrier))
        return steps_with_two_workers(tmp_path, directory, strategy=LAYOUTS[layout](), sync=sync)

    for steps in run_distributed(fit, 2, init_process_group=False, timeout=400.0):
        assert [step["versions"] for step in steps] == [[0], [1], [2]]
        for step in steps:
            assert step["metrics"]["actor/mismatch_abs_max"] < 1e-5
            assert step["metrics"]["sync/unchanged"] == 0.0
        assert torch.tensor([step["metrics"]["actor/grad_norm"] for step in steps]).min() > 0, "nothing was learned"
