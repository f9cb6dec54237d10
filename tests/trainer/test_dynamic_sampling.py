"""Dynamic sampling through the real Trainer: every group that trains has a signal, no prompt is lost or repeated."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import DynamicSampling, HFRollout, RLCheckpoint
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.data import PromptSampler
from lightning_rlhf.strategies import UlyssesRLStrategy

SEED, NUM_PROMPTS, PER_STEP, GROUP = 0, 12, 4, 4


def _number(prompt: str) -> int:
    return int("".join(c if c.isdigit() else " " for c in prompt).split()[0])


def odd_prompts_have_a_signal(
    prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]
) -> list[float | None]:
    """Even prompts: every reward is 1, one of a group unknown. Odd ones: the share of digits, and a bit of the text."""
    rewards: list[float | None] = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        even = _number(prompt) % 2 == 0
        digits = sum(c.isdigit() for c in response) / max(len(response), 1) + sum(map(ord, response)) / 1e4
        rewards.append((None if row % GROUP == 0 else 1.0) if even else digits)
    return rewards


def _fit(
    root: Path,
    model: Path,
    *,
    strategy: Any = "auto",
    devices: int = 1,
    settings: DynamicSampling | None = None,
    save: bool = False,
    ckpt_path: str | None = None,
    reward: Any = odd_prompts_have_a_signal,
    **module: Any,
) -> dict[str, Any]:
    recorder = Recorder()
    callbacks: list[Any] = [recorder, *([RLCheckpoint(every_n_rl_steps=1, save_top_k=-1)] if save else [])]
    rollout = HFRollout(
        num_rollouts=GROUP, max_new_tokens=8, max_model_len=64, dynamic_sampling=settings or DynamicSampling()
    )
    chosen = UlyssesRLStrategy(sp_size=2) if strategy == "ulysses" else strategy
    trainer = toy_trainer(root, callbacks=callbacks, rollout=rollout, strategy=chosen, devices=devices)
    grpo = toy_module(model, reward=reward, **{"max_rl_steps": 4, **module})
    data = toy_data()
    trainer.fit(grpo, data, ckpt_path=ckpt_path)
    return {
        "steps": recorder.steps,
        "position": data.state_dict()["train"]["prompts_consumed"],
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
    }


def _numbers_drawn(count: int) -> list[int]:
    """The numbers of the prompts in the order in which a run meets them, over epochs."""
    sampler = PromptSampler(NUM_PROMPTS, prompts_per_step=PER_STEP, seed=SEED)
    return [number for epoch in range(count // NUM_PROMPTS + 1) for number in sampler.order(epoch)][:count]


def _expected() -> tuple[list[list[int]], list[int]]:
    """By hand, of four steps: the odd prompts of each, and the prompts drawn by its end."""
    stream, at, steps, ends = _numbers_drawn(60), 0, [], []
    for _ in range(4):
        in_epoch = at % NUM_PROMPTS
        if in_epoch and in_epoch + PER_STEP > NUM_PROMPTS:  # a step starts within an epoch that can fill it
            at += NUM_PROMPTS - in_epoch
        tried, kept = [], []
        while len(kept) < PER_STEP:
            lacking = PER_STEP - len(kept)
            while lacking:
                number, at = stream[at], at + 1
                if number not in tried:
                    tried.append(number)
                    kept += [number] if number % 2 else []
                    lacking -= 1
        steps.append(sorted(kept))
        ends.append(at)
    return steps, ends


def _trained(steps: list[dict[str, Any]]) -> list[list[int]]:
    return [sorted(int(uid) for uid in step["uids"]) for step in steps]


def test_every_group_has_a_signal_and_the_prompts_follow_the_order_of_the_data(
    tmp_path: Path, tiny_directory: Path
) -> None:
    result = _fit(tmp_path, tiny_directory)
    steps, ends = _expected()
    assert _trained(result["steps"]) == steps
    assert any(len(set(a) & set(b)) for a, b in itertools.pairwise(steps))  # an epoch has six odd prompts
    assert result["position"] == ends[-1]
    drawn = [step["metrics"]["rollout/drawn_prompts"] for step in result["steps"]]
    for step in result["steps"]:
        metrics = step["metrics"]
        assert metrics["reward/groups_without_signal"] == 0.0
        assert metrics["rollout/kept_groups"] == PER_STEP
        assert metrics["rollout/dropped_groups"] == metrics["rollout/drawn_prompts"] - PER_STEP
        assert metrics["reward/failed"] == 0.0
    assert max(step["metrics"]["rollout/refill_rounds"] for step in result["steps"]) >= 2
    assert max(drawn) > PER_STEP


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_a_resumed_run_repeats_and_loses_no_prompt(tmp_path: Path, tiny_directory: Path, saved: int) -> None:
    whole = _fit(tmp_path / "whole", tiny_directory, save=True)
    checkpoint = tmp_path / "whole" / "checkpoints" / f"rl_step={saved:06d}.ckpt"
    rest = _fit(tmp_path / "rest", tiny_directory, save=True, ckpt_path=str(checkpoint))
    assert [step["tokens"] for step in rest["steps"]] == [step["tokens"] for step in whole["steps"][saved:]]
    assert rest["position"] == whole["position"]
    for name, value in whole["parameters"].items():
        assert (rest["parameters"][name] == value).all(), name


@pytest.mark.parametrize(("strategy", "advantage"), [("fsdp2_rl", "grpo"), ("fsdp2_rl", "remax"), ("ulysses", "remax")])
def test_two_ranks_fill_the_step_that_one_fills(
    tmp_path: Path, tiny_directory: Path, strategy: str, advantage: str
) -> None:
    """Two ranks with prompts of their own, or two that share each sequence; also with a greedy baseline each."""
    alone = _fit(tmp_path, tiny_directory, advantage=advantage)
    ranks = run_distributed(
        _fit, 2, tmp_path, tiny_directory, strategy=strategy, devices=2, advantage=advantage,
        init_process_group=False, timeout=120.0,
    )  # fmt: skip
    for step, parts in zip(alone["steps"], zip(*(rank["steps"] for rank in ranks), strict=True), strict=True):
        uids = [set(part["uids"]) for part in parts]
        assert set.union(*uids) == set(step["uids"])
        assert (strategy == "ulysses") == (uids[0] == uids[1])
        for part in parts:
            for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
                assert part["metrics"][name] == pytest.approx(step["metrics"][name], abs=1e-5), name
            for name in ("refill_rounds", "drawn_prompts", "kept_groups", "dropped_groups"):
                assert part["metrics"][f"rollout/{name}"] == step["metrics"][f"rollout/{name}"]
    for rank in ranks:
        assert rank["position"] == alone["position"]
        for name, value in alone["parameters"].items():
            assert torch.allclose(torch.tensor(rank["parameters"][name]), torch.tensor(value), atol=1e-5), name


def _fit_with_rows(root: Path, model: Path, **settings: Any) -> tuple[list[int], list[float]]:
    """Rows of this rank before the exchange, and the losses."""
    rows: list[int] = []
    infer = BaseEngine.train_batch

    def counted(engine: BaseEngine, data: Any, loss: Any) -> dict[str, float]:
        rows.append(len(data))
        return infer(engine, data, loss)

    BaseEngine.train_batch = counted  # type: ignore[method-assign]
    result = _fit(root, model, **settings)
    own = [len(step["uids"]) for step in result["steps"]]
    assert rows == [PER_STEP * GROUP // 2] * len(own)  # balanced again, whoever sampled them
    return own, [step["metrics"]["actor/loss"] for step in result["steps"]]


def test_a_rank_whose_groups_are_all_left_out_joins_in(tmp_path: Path, tiny_directory: Path) -> None:
    """The first step's second rank has prompts without a signal alone; one round at most, then it fills up."""
    first = PromptSampler(NUM_PROMPTS, prompts_per_step=PER_STEP, seed=SEED).order(0)
    good = set(first[:2] + first[4:5])

    def reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        return [float(_number(prompt) in good and row % GROUP == 0) for row, prompt in enumerate(prompts)]

    # four prompts: two good ones on rank 0; then two more: one good one on rank 0; then one, on rank 1
    ranks = run_distributed(
        _fit_with_rows, 2, tmp_path, tiny_directory, strategy="fsdp2_rl", devices=2, max_rl_steps=1, reward=reward,
        settings=DynamicSampling(max_rounds=1), init_process_group=False, timeout=120.0,
    )  # fmt: skip
    assert [own for own, _ in ranks] == [[3], [1]]
    assert ranks[0][1] == ranks[1][1]
    alone = _fit(tmp_path, tiny_directory, max_rl_steps=1, reward=reward, settings=DynamicSampling(max_rounds=1))
    assert alone["steps"][0]["metrics"]["actor/loss"] == pytest.approx(ranks[0][1][0], abs=1e-6)
    # the fourth place goes to the first group without a signal
    assert _trained(alone["steps"]) == [sorted([*good, first[2]])]


def nothing_has_a_signal(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    return [1.0] * len(prompts)


def test_at_the_limit_it_trains_on_what_there_is(tmp_path: Path, tiny_directory: Path) -> None:
    settings = DynamicSampling(max_rounds=2)
    result = _fit(tmp_path, tiny_directory, settings=settings, reward=nothing_has_a_signal, max_rl_steps=2)
    stream = _numbers_drawn(24)
    assert _trained(result["steps"]) == [sorted(stream[:4]), sorted(stream[12:16])]
    assert result["position"] == 24
    metrics = result["steps"][0]["metrics"]
    assert (metrics["rollout/refill_rounds"], metrics["rollout/drawn_prompts"]) == (2.0, 12.0)
    assert (metrics["rollout/kept_groups"], metrics["rollout/dropped_groups"]) == (0.0, 12.0)
    assert metrics["actor/grad_norm"] == 0.0


def test_it_ends_when_every_prompt_has_been_tried(tmp_path: Path, tiny_directory: Path) -> None:
    settings = DynamicSampling(max_rounds=50)
    metrics = _fit(tmp_path, tiny_directory, settings=settings, reward=nothing_has_a_signal, max_rl_steps=1)["steps"][
        0
    ]["metrics"]
    assert (metrics["rollout/refill_rounds"], metrics["rollout/drawn_prompts"]) == (2.0, 12.0)


def test_at_the_limit_it_ends_the_run_if_told_to(tmp_path: Path, tiny_directory: Path) -> None:
    settings = DynamicSampling(max_rounds=1, at_limit="error")
    with pytest.raises(RuntimeError, match="found 0 of 4 groups with different rewards among 8 prompts in 1 rounds"):
        _fit(tmp_path, tiny_directory, settings=settings, reward=nothing_has_a_signal)


def test_what_cannot_be_meant_is_refused(tmp_path: Path, tiny_directory: Path) -> None:
    for wrong, message in (({"max_rounds": 0}, "max_rounds=0"), ({"at_limit": "stop"}, "at_limit='stop'")):
        with pytest.raises(ValueError, match=message):
            DynamicSampling(**wrong)
    with pytest.raises(ValueError, match="num_rollouts=1"):
        HFRollout(num_rollouts=1, dynamic_sampling=DynamicSampling())
    trainer = toy_trainer(tmp_path, rollout=HFRollout(dynamic_sampling=DynamicSampling()))
    data = toy_data()
    data.prepare_data()
    with pytest.raises(TypeError, match="PromptDataModule"):
        trainer.fit(toy_module(tiny_directory), train_dataloaders=[None])
