"""One module, several Trainers; several modules, one Trainer: no weights are mixed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.tiny import write_tiny_model
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import HFRollout, RLCheckpoint
from lightning_rlhf.data import ListPrompts

VALIDATION = ListPrompts(["7 + 7 =", "8 + 8 =", "1 + 9 =", "2 + 9 ="])


def _fit_validate_fit(root: Path, model: Path) -> dict[str, Any]:
    first = toy_trainer(
        root / "first", callbacks=[RLCheckpoint(every_n_rl_steps=1, save_top_k=-1)], strategy="fsdp2_rl"
    )
    module = toy_module(model, max_rl_steps=2)
    first.fit(module, toy_data())
    after_two = parameters_of(module)
    one = str(root / "first" / "checkpoints" / "rl_step=000001.ckpt")

    second = toy_trainer(root / "second", strategy="fsdp2_rl")
    second.validate(module, toy_data(val_source=VALIDATION), ckpt_path=one)
    after_load = parameters_of(module)
    loaded_version = module.policy_version

    third = toy_trainer(root / "third", callbacks=[RLCheckpoint(every_n_rl_steps=1)], strategy="fsdp2_rl")
    module.max_rl_steps = 3
    third.fit(module, toy_data(), ckpt_path=str(root / "first" / "checkpoints" / "rl_step=000002.ckpt"))
    saved = root / "third" / "checkpoints" / "rl_step=000003.ckpt"
    return {
        "loading changed the weights": any(not torch.equal(after_two[n], after_load[n]) for n in after_two),
        "loaded version": loaded_version,
        "engine saved": (saved / "actor" / ".metadata").is_file(),
        "rl_step": module.rl_step,
    }


def test_a_module_goes_from_fit_to_validate_to_fit(tmp_path: Path, tiny_directory: Path) -> None:
    (result,) = run_distributed(_fit_validate_fit, 1, tmp_path, tiny_directory, init_process_group=False, timeout=120.0)
    assert result == {
        "loading changed the weights": True,
        "loaded version": 1,
        "engine saved": True,
        "rl_step": 3,
    }


def _other_precision(root: Path, model: Path) -> str:
    module = toy_module(model, max_rl_steps=1)
    toy_trainer(root, strategy="fsdp2_rl").fit(module, toy_data())
    try:
        toy_trainer(root, strategy="fsdp2_rl", precision="bf16-mixed").fit(module, toy_data())
    except ValueError as error:
        return str(error)
    return ""


def test_a_trainer_of_another_precision_does_not_take_the_engine(tmp_path: Path, tiny_directory: Path) -> None:
    (message,) = run_distributed(_other_precision, 1, tmp_path, tiny_directory, init_process_group=False)
    assert "compute dtype torch.float32, this one torch.bfloat16" in message


def test_equal_versions_of_two_modules_are_not_equal_weights(tmp_path: Path, tiny_directory: Path) -> None:
    """Both are version 0: the second must not be scored with the first one's weights."""
    other_directory = write_tiny_model(tmp_path / "other", seed=5)
    data = toy_data(val_source=VALIDATION)
    rollout = HFRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64)
    trainer = toy_trainer(tmp_path, rollout=rollout)
    held = []
    for directory in (tiny_directory, other_directory):
        module = toy_module(directory)
        trainer.validate(module, data, verbose=False)
        assert rollout.engine is not None
        name = "model.embed_tokens.weight"
        held.append(rollout.engine.read_weights([name])[name].clone())
        assert torch.equal(held[-1], parameters_of(module)[name])
    assert not torch.equal(held[0], held[1])


def test_a_loaded_checkpoint_reaches_the_sampler_though_its_version_is_the_same(
    tmp_path: Path, tiny_directory: Path
) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        rollout = HFRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64, seed=seed)
        trainer = toy_trainer(tmp_path / name, rollout=rollout, callbacks=[RLCheckpoint(every_n_rl_steps=2)])
        module = toy_module(tiny_directory, max_rl_steps=2)
        trainer.fit(module, toy_data(val_source=VALIDATION))
    other = str(tmp_path / "a" / "checkpoints" / "rl_step=000002.ckpt")
    trainer.validate(module, toy_data(val_source=VALIDATION), ckpt_path=other, verbose=False)
    embedding = "model.embed_tokens.weight"
    assert rollout.engine is not None
    assert torch.equal(rollout.engine.read_weights([embedding])[embedding], parameters_of(module)[embedding])


def test_a_second_run_with_the_same_callbacks_saves_again(tmp_path: Path, tiny_directory: Path) -> None:
    checkpoint = RLCheckpoint(dirpath=tmp_path / "checkpoints", every_n_rl_steps=5)
    for _ in range(2):
        module = toy_module(tiny_directory, max_rl_steps=1)
        toy_trainer(tmp_path, callbacks=[checkpoint]).fit(module, toy_data())
        saved = tmp_path / "checkpoints" / "rl_step=000001.ckpt"
        assert saved.exists()
        saved.unlink()


def test_validation_takes_no_time_of_the_next_rl_step(tmp_path: Path, tiny_directory: Path) -> None:
    module = toy_module(tiny_directory, max_rl_steps=2)
    trainer = toy_trainer(tmp_path, val_check_interval=1, num_sanity_val_steps=0)
    trainer.fit(module, toy_data(val_source=VALIDATION))
    assert module._timings == {}


def _fails_on_one_rank(root: Path, model: Path) -> dict[str, float]:
    def reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float | None]:
        return [None if prompt.startswith(("7", "8")) else 1.0 for prompt in prompts]

    data = toy_data(val_source=VALIDATION)
    trainer = toy_trainer(root, strategy="fsdp2_rl", devices=2)
    module = toy_module(model, reward=reward)
    trainer.validate(module, data, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_validation_on_a_rank_whose_rewards_all_failed(tmp_path: Path, tiny_directory: Path) -> None:
    for metrics in run_distributed(_fails_on_one_rank, 2, tmp_path, tiny_directory, init_process_group=False):
        assert metrics["val/failed"] == 2


def test_a_step_whose_rewards_all_failed_moves_nothing(tmp_path: Path, tiny_directory: Path) -> None:
    """Not even by AdamW's momentum, which the step before has built up."""
    seen: list[dict[str, torch.Tensor]] = []

    class Weights(Recorder):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            seen.append(parameters_of(pl_module))

    module = toy_module(tiny_directory, max_rl_steps=2)
    working = module.reward
    module.reward = lambda p, r, m: working(p, r, m) if module.rl_step == 0 else [None] * len(r)
    recorder = Weights()
    with pytest.warns(UserWarning, match="had no row with a reward"):
        toy_trainer(tmp_path, callbacks=[recorder]).fit(module, toy_data())
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
    assert module.policy_version == 1
    metrics = recorder.steps[1]["metrics"]
    assert (metrics["actor/loss"], metrics["actor/skipped_steps"], metrics["reward/failed"]) == (0.0, 1.0, 16.0)


def test_e03_prompts_that_were_never_sampled_are_no_rewards(tmp_path: Path, tiny_directory: Path) -> None:
    recorder = Recorder()
    rollout = HFRollout(num_rollouts=4, max_new_tokens=2, max_model_len=3)
    trainer = toy_trainer(tmp_path, rollout=rollout, callbacks=[recorder])
    trainer.fit(toy_module(tiny_directory, max_rl_steps=1), toy_data())
    metrics = recorder.steps[0]["metrics"]
    assert metrics["rollout/skipped"] == 16
    assert metrics["reward/failed"] == 0
    assert "reward/mean" not in metrics


def test_i02_extremes_stay_extremes_over_several_steps(tmp_path: Path, tiny_directory: Path) -> None:
    recorder = Recorder()
    module = toy_module(tiny_directory, max_rl_steps=1, mini_batch_size=4)
    per_step: list[dict[str, float]] = []

    class Spy(Recorder):
        """Keeps what each call of the engine's ``train_batch`` returns."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            train = pl_module.actor.train_batch

            def kept(data: Any, loss: Any) -> dict[str, float]:
                per_step.append(train(data, loss))
                return per_step[-1]

            pl_module.actor.train_batch = kept

    toy_trainer(tmp_path, callbacks=[recorder, Spy()]).fit(module, toy_data())
    assert len(per_step) == 4
    metrics = recorder.steps[0]["metrics"]
    assert metrics["actor/ratio_min"] == min(step["ratio_min"] for step in per_step)
    assert metrics["actor/ratio_max"] == max(step["ratio_max"] for step in per_step)
    assert metrics["actor/loss"] == pytest.approx(sum(step["loss"] for step in per_step) / 4)


def test_a_greedy_rollout_is_refused_for_training() -> None:
    with pytest.raises(ValueError, match="temperature=0 samples the same response"):
        HFRollout(temperature=0.0)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_plain_strategies_refuse_the_same_precisions(tmp_path: Path, tiny_directory: Path, precision: Any) -> None:
    with pytest.raises(ValueError, match="'32-true' or 'bf16-mixed'"):
        toy_trainer(tmp_path, precision=precision).fit(toy_module(tiny_directory), toy_data())


def test_f03_a_file_that_was_cut_short_is_not_last(tmp_path: Path, tiny_directory: Path) -> None:
    trainer = toy_trainer(tmp_path, callbacks=[RLCheckpoint(every_n_rl_steps=1)])
    trainer.fit(toy_module(tiny_directory, max_rl_steps=2), toy_data())
    whole = tmp_path / "checkpoints" / "rl_step=000002.ckpt"
    content = whole.read_bytes()
    (whole.parent / "rl_step=000009.ckpt").write_bytes(content[: len(content) // 2])
    with pytest.warns(UserWarning, match=r"not whole: rl_step=000009\.ckpt"):
        assert trainer.checkpoint_callback._find_last_checkpoints(trainer) == {str(whole)}  # type: ignore[union-attr]


def _module_with_reference(root: Path, model: Path) -> float:
    from transformers import AutoModelForCausalLM

    recorder = Recorder()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    module = toy_module(loaded, tokenizer=model, kl_coef=0.1, max_rl_steps=2)
    toy_trainer(root, callbacks=[recorder], strategy="fsdp2_rl").fit(module, toy_data())
    return float(recorder.steps[1]["metrics"]["actor/ref_kl"])


def test_a_module_as_model_may_have_a_reference(tmp_path: Path, tiny_directory: Path) -> None:
    (kl,) = run_distributed(_module_with_reference, 1, tmp_path, tiny_directory, init_process_group=False)
    assert kl > 0


def _different_models(root: Path, model: Path) -> dict[str, float]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    module = toy_module(loaded, tokenizer=model, max_rl_steps=1)
    toy_trainer(root, strategy="fsdp2_rl", devices=2).fit(module, toy_data())
    return {name: float(value.double().sum()) for name, value in parameters_of(module).items()}


def test_ranks_train_the_first_ranks_weights(tmp_path: Path, tiny_directory: Path) -> None:
    results = run_distributed(_different_models, 2, tmp_path, tiny_directory, init_process_group=False)
    assert results[0] == results[1]
