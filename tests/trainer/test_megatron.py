"""GRPO and PPO under megatron_rl through the real Trainer: the numbers of FSDP2, and one truth within a group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fork import DistributedError, run_distributed
from support.megatron_imports import megatron_is_imported  # noqa: F401
from support.replay import ReplayRollout, RolloutRecorder, joined, samples_of
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_ppo, toy_trainer

from lightning_rlhf.callbacks import HFRollout, RLCheckpoint
from lightning_rlhf.contracts.lora import LoRAConfig
from lightning_rlhf.strategies import FSDP2RLStrategy, MegatronRLStrategy
from lightning_rlhf.types import Rollouts

COMPARED = ("actor/loss", "actor/grad_norm", "actor/entropy", "reward/mean", "reward/std", "rollout/trained_tokens")
SAMPLING: dict[str, Any] = {"num_rollouts": 4, "max_new_tokens": 8, "max_model_len": 64}


def fit(root: Path, model: Path, strategy: Any, devices: int, replay: Sequence[Rollouts] = (), **module: Any) -> Any:
    recorder, rollouts = Recorder(), RolloutRecorder()
    callback = ReplayRollout(replay, **SAMPLING) if replay else HFRollout(**SAMPLING)
    trainer = toy_trainer(root, callbacks=[recorder, rollouts], rollout=callback, strategy=strategy, devices=devices)
    grpo = toy_module(model, **module)
    trainer.fit(grpo, toy_data())
    return {
        "steps": recorder.steps,
        "rollouts": rollouts.rollouts,
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
    }


def fit_ranks(root: Path, model: Path, make: Any, ranks: int, *more: Any, **settings: Any) -> list[Any]:
    return run_distributed(
        lambda: fit(root, model, make(), ranks, *more, **settings), ranks, init_process_group=False, timeout=120.0
    )


def assert_same(one: dict[str, Any], other: dict[str, Any], *, tolerance: float) -> None:
    assert len(one["steps"]) == len(other["steps"])
    for a, b in zip(one["steps"], other["steps"], strict=True):
        for name in COMPARED:
            assert a["metrics"][name] == pytest.approx(b["metrics"][name], abs=tolerance), (a["rl_step"], name)
    assert one["parameters"].keys() == other["parameters"].keys()
    for name, value in one["parameters"].items():
        np.testing.assert_allclose(value, other["parameters"][name], atol=tolerance, rtol=0, err_msg=name)


LAYOUTS = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}
SETTINGS: dict[str, Any] = {"mini_batch_size": 8, "kl_coef": 0.1, "max_rl_steps": 5}


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> dict[str, Any]:
    """Five steps on two ranks, with two mini-batches each and a reference; the rollouts of both ranks."""
    ranks = fit_ranks(tmp_path_factory.mktemp("fsdp2"), tiny_directory, FSDP2RLStrategy, 2, **SETTINGS)
    return {**ranks[0], "rollouts": joined([rank["rollouts"] for rank in ranks])}


@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_replayed_rollouts_give_the_weights_of_fsdp2(
    tmp_path: Path, tiny_directory: Path, fsdp2: dict[str, Any], sizes: dict[str, int]
) -> None:
    """Two optimizer steps in each of five RL steps; both ranks hold all rows and the same numbers."""
    make = lambda: MegatronRLStrategy(**sizes)  # type: ignore[arg-type]  # noqa: E731
    for result in fit_ranks(tmp_path, tiny_directory, make, 2, fsdp2["rollouts"], **SETTINGS):
        assert_same(fsdp2, result, tolerance=1e-4)


def test_the_first_step_samples_what_fsdp2_samples(tmp_path: Path, tiny_directory: Path, fsdp2: dict[str, Any]) -> None:
    make = lambda: MegatronRLStrategy(tensor_parallel_size=2)  # noqa: E731
    ranks = fit_ranks(tmp_path, tiny_directory, make, 2, **{**SETTINGS, "max_rl_steps": 1})
    for result in ranks:
        assert samples_of(result["rollouts"][0]) == samples_of(fsdp2["rollouts"][0])
        for name in COMPARED:
            found, expected = result["steps"][0]["metrics"][name], fsdp2["steps"][0]["metrics"][name]
            assert found == pytest.approx(expected, abs=1e-5), name


def test_by_name_alone_all_sizes_are_one(tmp_path: Path, tiny_directory: Path, fsdp2: dict[str, Any]) -> None:
    ranks = fit_ranks(tmp_path, tiny_directory, lambda: "megatron_rl", 2, fsdp2["rollouts"], **SETTINGS)
    for result in ranks:
        assert len(result["steps"][0]["uids"]) == 2  # each rank its own prompts
        assert_same(fsdp2, result, tolerance=1e-4)


def test_ppo_has_its_critic_on_the_last_stage(tmp_path: Path, tiny_directory: Path) -> None:
    def fit_ppo(strategy: Any, devices: int) -> dict[str, Any]:
        recorder = Recorder()
        ppo = toy_ppo(tiny_directory, max_rl_steps=2)
        toy_trainer(tmp_path, callbacks=[recorder], strategy=strategy, devices=devices).fit(ppo, toy_data())
        critic = {name: tensor.numpy() for name, tensor in parameters_of(ppo, role="critic").items()}
        return {"steps": recorder.steps, "parameters": critic}

    plain = fit_ppo("auto", 1)
    assert plain["steps"][1]["metrics"]["critic/loss"] > 0
    for result in run_distributed(
        lambda: fit_ppo(MegatronRLStrategy(pipeline_parallel_size=2), 2), 2, init_process_group=False, timeout=120.0
    ):
        assert_same(plain, result, tolerance=1e-4)
        for a, b in zip(plain["steps"], result["steps"], strict=True):
            assert a["metrics"]["critic/loss"] == pytest.approx(b["metrics"]["critic/loss"], abs=1e-4)


def test_a_run_goes_on_in_another_layout(tmp_path: Path, tiny_directory: Path) -> None:
    """Two steps on tp 2, then two on pp 2 from its checkpoint; as four steps without a break."""

    def run(sizes: dict[str, int], steps: int, ckpt_path: Path | None) -> Any:
        recorder = Recorder()
        saver = RLCheckpoint(dirpath=tmp_path / "checkpoints", every_n_rl_steps=2)
        strategy = MegatronRLStrategy(**sizes)  # type: ignore[arg-type]
        trainer = toy_trainer(tmp_path, callbacks=[recorder, saver], strategy=strategy, devices=2)
        grpo = toy_module(tiny_directory, max_rl_steps=steps)
        trainer.fit(grpo, toy_data(), ckpt_path=ckpt_path)
        return {
            "steps": recorder.steps,
            "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
        }

    def ranks(*arguments: Any) -> Any:
        return run_distributed(run, 2, *arguments, init_process_group=False, timeout=120.0)[0]

    ranks({"tensor_parallel_size": 2}, 2, None)
    saved = next((tmp_path / "checkpoints").glob("*.ckpt"))
    resumed = ranks({"pipeline_parallel_size": 2}, 4, saved)
    whole = fit_ranks(tmp_path, tiny_directory, lambda: MegatronRLStrategy(tensor_parallel_size=2), 2, max_rl_steps=4)
    assert_same({**whole[0], "steps": whole[0]["steps"][2:]}, resumed, tolerance=1e-4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "world size 2 is not a multiple of .* = 4"),
        ({"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}, "2 layers cannot be cut into"),
        ({"sequence_parallel": True}, "sequence_parallel=True needs tensor_parallel_size above 1"),
        ({"expert_parallel_size": 2}, "has no experts"),
    ],
)
def test_g03_sizes_that_do_not_fit_are_refused_before_anything_loads(
    tmp_path: Path, tiny_directory: Path, sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DistributedError, match=message):
        fit_ranks(tmp_path, tiny_directory, lambda: MegatronRLStrategy(**sizes), 2)


def test_g03_an_adapter_is_refused(tmp_path: Path, tiny_directory: Path) -> None:
    message = "lora= does not work with MegatronEngine.* Use the fsdp2, ulysses or torch back end"
    with pytest.raises(DistributedError, match=message):
        fit_ranks(tmp_path, tiny_directory, MegatronRLStrategy, 1, lora=LoRAConfig())
