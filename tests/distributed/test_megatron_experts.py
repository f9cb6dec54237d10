"""Experts under megatron's engine: choices recorded and replayed through the contract, and the load that is logged."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.experience import make_experience, policy_gradient
from support.fork import DistributedError, run_distributed
from support.megatron_imports import megatron_is_imported  # noqa: F401
from support.tiny import VOCAB_SIZE, tiny_tokenizer
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_trainer
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_rlhf.callbacks import HFExport
from lightning_rlhf.contracts.callback import RLCallback
from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.megatron.config import MoEOptions
from lightning_rlhf.engines.megatron.engine import MegatronEngine
from lightning_rlhf.engines.megatron.layout import MegatronLayout
from lightning_rlhf.engines.megatron.load import disk_names
from lightning_rlhf.engines.megatron.router_replay import FREE
from lightning_rlhf.metrics import Metric
from lightning_rlhf.parity.tiny_models import tiny_model
from lightning_rlhf.strategies import MegatronRLStrategy
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

LENGTHS = [5, 30, 8, 17, 3, 40, 12, 10]
EXPERTS, LAYERS, TOPK = 4, 2, 2
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


def _engine(layout: MegatronLayout | None = None, **changes: Any) -> MegatronEngine:
    more = {name: changes.pop(name) for name in ("moe", "recompute") if name in changes}
    settings = {"model": tiny_model("tiny-qwen3-moe"), "optimizer": ADAMW, "micro_batch_size": 2}
    moe = more.pop("moe", MoEOptions(router_replay="old"))
    engine = MegatronEngine(
        EngineConfig(**{**settings, **changes}), device=torch.device("cpu"), layout=layout, moe=moe, **more
    )
    engine.initialize()
    return engine


def _drawn() -> Experience:
    """Rows with other experts than routers take; one token in five is left to its router."""
    data, draw = make_experience(LENGTHS), torch.Generator().manual_seed(4)
    scores = torch.rand(data.num_tokens, LAYERS, EXPERTS, generator=draw)
    experts = scores.topk(TOPK).indices.to(torch.int32)
    experts[::5] = FREE
    return dataclasses.replace(data, routed_experts=experts)


def _difference(outputs: ModelOutputs, rows: Experience) -> LossOutput:
    """``policy_gradient``, which tells how far log-probs are from the old ones."""
    assert outputs.log_probs is not None
    assert rows.old_log_probs is not None
    apart = (outputs.log_probs - rows.old_log_probs).abs()
    return dataclasses.replace(policy_gradient(outputs, rows), metrics={"apart": Metric.max(apart, rows.response_mask)})


def _passes(layout: MegatronLayout | None, **changes: Any) -> dict[str, Any]:
    """Log-probs and experts of the model's own choices, the same replayed, and drawn ones, then updates of both."""
    engine = _engine(layout, **changes)
    rows = list(range(engine.data_parallel_rank, len(LENGTHS), engine.data_parallel_size))
    drawn = _drawn().select(rows)
    free = dataclasses.replace(drawn, routed_experts=None)
    own = engine.infer_batch(free)
    again = engine.infer_batch(dataclasses.replace(free, routed_experts=own.routed_experts))
    other = engine.infer_batch(drawn)
    assert again.routed_experts is own.routed_experts
    assert torch.equal(again.log_probs, own.log_probs)  # type: ignore[arg-type]
    updates = []
    for data in (drawn, free):
        whole = dataclasses.replace(data, old_log_probs=other.log_probs)
        updates.append(engine.forward_backward_batch(whole, _difference)["apart"].value.item())
    step = engine.train_batch(dataclasses.replace(drawn, old_log_probs=other.log_probs), _difference)
    return {
        "rows": rows,
        "own": own.log_probs,
        "experts": own.routed_experts,
        "drawn": other.log_probs,
        "updates": updates,
        "load": (step["expert_load_max"], step["idle_experts"]),
    }


def _of_rows(value: Tensor, rows: list[int]) -> Tensor:
    """``value`` of all tokens, cut to those of some rows."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    return torch.cat([value[starts[row] : starts[row + 1]] for row in rows])


LAYOUTS: dict[str, tuple[int, MegatronLayout, dict[str, Any]]] = {
    "tp2_ep2": (
        2,
        MegatronLayout(
            tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=2, expert_tensor_parallel_size=1
        ),
        {},
    ),
    "cp2_pp2_recomputed": (
        4,
        MegatronLayout(context_parallel_size=2, pipeline_parallel_size=2),
        {"recompute": "full"},
    ),
    "ep2_allgather": (
        2,
        MegatronLayout(expert_parallel_size=2),
        {"moe": MoEOptions(router_replay="old", dispatcher="allgather")},
    ),
}


@pytest.mark.parametrize(("ranks", "layout", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_replayed_choices_give_the_old_log_probs_in_the_update(
    ranks: int, layout: MegatronLayout, changes: dict[str, Any]
) -> None:
    (one,) = run_distributed(_passes, 1, None)
    mask = make_experience(LENGTHS).response_mask
    assert float((one["drawn"] - one["own"])[mask].abs().max()) > 1e-3, "the drawn choices must matter"
    assert ((one["experts"] >= 0) & (one["experts"] < EXPERTS)).all()
    for found in [one, *run_distributed(_passes, ranks, layout, **changes)]:
        replayed, free = found["updates"]
        assert replayed < 1e-5
        assert free > 1e-3, "negative control: routers that choose freely compute another model"
        for name in ("own", "drawn"):
            assert float((found[name] - _of_rows(one[name], found["rows"])).abs().max()) < 1e-5, name
        assert torch.equal(found["experts"], _of_rows(one["experts"], found["rows"]))
        busiest, idle = found["load"]
        assert 1.0 < busiest < EXPERTS
        assert idle == 0.0


def _without_replay() -> tuple[bool, bool, bool]:
    drawn = _drawn()
    off = _engine(moe=MoEOptions())
    reference = _engine(optimizer=None, role="reference")
    told, free = (off.infer_batch(data) for data in (drawn, dataclasses.replace(drawn, routed_experts=None)))
    followed = reference.infer_batch(drawn)
    same = torch.equal(told.log_probs, free.log_probs)  # type: ignore[arg-type]
    return same, free.routed_experts is None, torch.equal(followed.log_probs, free.log_probs)  # type: ignore[arg-type]


def test_switched_off_and_in_the_reference_routers_choose_themselves() -> None:
    assert run_distributed(_without_replay, 1) == [(True, True, True)]


def test_a_dense_model_has_no_choices_to_replay() -> None:
    with pytest.raises(DistributedError, match="router_replay='old' is for a mixture of experts, and qwen3 has none"):
        run_distributed(lambda: _engine(model=tiny_model("tiny-qwen3")).config.role, 1)


class _Seen(RLCallback):
    """What reaches the actor's update."""

    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        train_batch = pl_module.actor.train_batch

        def seen(data: Experience, loss_function: Any) -> Any:
            experts = data.routed_experts
            self.shapes.append(None if experts is None else (tuple(experts.shape), data.num_tokens))
            return train_batch(data, loss_function)

        pl_module.actor.train_batch = seen


def _fit(root: Path, **options: Any) -> tuple[list[Any], list[dict[str, float]], dict[str, Tensor]]:
    seen, recorder = _Seen(), Recorder()
    strategy = MegatronRLStrategy(
        tensor_parallel_size=2,
        sequence_parallel=True,
        expert_parallel_size=2,
        expert_tensor_parallel_size=1,
        **options,
    )
    export = HFExport(dirpath=root / "exported")
    trainer = toy_trainer(root, callbacks=[seen, recorder, export], strategy=strategy, devices=2)
    grpo = toy_module(root / "model", max_rl_steps=2, mini_batch_size=8)
    trainer.fit(grpo, toy_data())
    return seen.shapes, [step["metrics"] for step in recorder.steps], parameters_of(grpo)


@pytest.mark.parametrize("replay", ["old", "off"])
def test_grpo_replays_what_the_old_log_probs_were_computed_with(tmp_path: Path, replay: str) -> None:
    model = tiny_model("tiny-qwen3-moe")
    model.resize_token_embeddings(VOCAB_SIZE)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    results = run_distributed(_fit, 2, tmp_path, init_process_group=False, router_replay=replay)
    for shapes, steps, _ in results:
        assert len(shapes) == 4, steps
        for shape in shapes:
            assert (shape is None) if replay == "off" else shape == ((shape[1], LAYERS, TOPK), shape[1])
        assert steps[0]["actor/expert_load_max"] > 1.0
        assert 0.0 <= steps[0]["actor/idle_experts"] < 1.0
        for step in steps:  # the rollout engine has each expert's weights that the trainer has
            assert step["actor/mismatch_abs_max"] < 1e-5
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    expected = disk_names(exported, exported.state_dict())
    for name, value in results[0][2].items():
        assert torch.equal(value, expected[name]), name
