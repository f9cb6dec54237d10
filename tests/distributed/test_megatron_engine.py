"""Megatron's engine beyond the contract: optimizers, checkpoints in other layouts, empty micro-batches, refusals."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.experience import make_experience, policy_gradient
from support.fork import DistributedError, run_distributed
from support.megatron_imports import megatron_is_imported  # noqa: F401
from support.tiny import tiny_model
from torch import Tensor, nn

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.contracts.lora import LoRAConfig
from lightning_rlhf.engines.megatron.data_parallel import DataParallelOptions
from lightning_rlhf.engines.megatron.engine import MegatronEngine
from lightning_rlhf.engines.megatron.layout import MegatronLayout
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.modules.reference import move_reference
from lightning_rlhf.parity.tiny_models import tiny_model as parity_model
from lightning_rlhf.strategies import MegatronRLStrategy
from lightning_rlhf.types import Experience

CPU = torch.device("cpu")
LENGTHS = [5, 30, 8, 17, 3, 40, 12, 10]
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, weight_decay=0.1)
DISTRIBUTED = DataParallelOptions(distributed_optimizer=True)


def _data() -> Experience:
    return make_experience(LENGTHS, temperature=0.7)


def _own(engine: BaseEngine) -> Experience:
    return _data().select(list(range(engine.data_parallel_rank, len(LENGTHS), engine.data_parallel_size)))


def _engine(layout: MegatronLayout | None = None, **changes: Any) -> MegatronEngine:
    more = {name: changes.pop(name) for name in ("data_parallel", "moe", "recompute") if name in changes}
    settings = {"model": tiny_model(), "optimizer": ADAMW, "max_grad_norm": 0.5, "micro_batch_size": 2}
    engine = MegatronEngine(EngineConfig(**{**settings, **changes}), device=CPU, layout=layout, **more)
    engine.initialize()
    return engine


def _parameters(engine: BaseEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.get_per_tensor_param()}


def _trained(layout: MegatronLayout | None, steps: int = 3, **changes: Any) -> dict[str, Tensor]:
    engine = _engine(layout, **changes)
    for _ in range(steps):
        engine.train_batch(_own(engine), policy_gradient)
    return _parameters(engine)


def _by_torch(steps: int = 3, **changes: Any) -> dict[str, Tensor]:
    settings = {"model": tiny_model(), "optimizer": ADAMW, "max_grad_norm": 0.5}
    engine = TorchEngine(EngineConfig(**{**settings, **changes}), device=CPU)
    engine.initialize()
    for _ in range(steps):
        engine.train_batch(_data(), policy_gradient)
    return _parameters(engine)


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= tolerance, name


# --- optimizers ------------------------------------------------------------------------------------------------------


def _norms_without_decay(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, told apart by shape; the second has another learning rate as well."""
    every = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in every if p.ndim > 1], "weight_decay": 0.5},
            {"params": [p for p in every if p.ndim == 1], "weight_decay": 0.0, "lr": 5e-3},
        ],
        lr=1e-3,
        eps=1e-4,
    )


@pytest.mark.parametrize(
    ("optimizer", "data_parallel"),
    [
        (ADAMW, DataParallelOptions()),
        (ADAMW, DISTRIBUTED),
        (_norms_without_decay, DataParallelOptions()),
        (_norms_without_decay, DISTRIBUTED),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01), DataParallelOptions()),
    ],
    ids=["adamw", "adamw-distributed", "groups", "groups-distributed", "sgd"],
)
def test_optimizers_step_as_torchs(optimizer: Any, data_parallel: DataParallelOptions) -> None:
    """Norm weights decay if their group says so: megatron's own default leaves them out."""
    expected = _by_torch(optimizer=optimizer)
    for found in run_distributed(_trained, 2, None, optimizer=optimizer, data_parallel=data_parallel):
        _assert_close(found, expected)


def _half(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters)[::2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": partial(torch.optim.Adagrad, lr=1e-3)}, "not torch.optim.adagrad.Adagrad"),
        ({"optimizer": partial(torch.optim.Adam, lr=1e-3)}, "not torch.optim.adam.Adam"),
        ({"optimizer": partial(torch.optim.AdamW, amsgrad=True)}, "no amsgrad=True"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)}, "no nesterov=True"),
        ({"optimizer": _half}, r"leaves out \d+ of \d+ parameters"),
        (
            {"optimizer": partial(torch.optim.SGD, lr=0.1), "data_parallel": DISTRIBUTED},
            "shares the state of AdamW alone, not of SGD",
        ),
        ({"model": nn.Linear(2, 2)}, "cannot train a Linear"),
        ({"share_prompts": True}, "share_prompts=True does not work with MegatronEngine"),
        ({"lora": LoRAConfig()}, "lora= does not work with MegatronEngine"),
    ],
)
def test_what_megatron_cannot_do_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DistributedError, match=message):
        run_distributed(lambda: _engine(**changes) and None, 1)


def test_checkpoints_beside_training_are_refused_by_name() -> None:
    engine = MegatronEngine(EngineConfig(model=tiny_model(), optimizer=ADAMW), device=CPU)
    with pytest.raises(
        RuntimeError, match="MegatronEngine writes its checkpoints while training waits; use async_save"
    ):
        engine.checkpoint_writer(None)
    with pytest.raises(TypeError, match="async_save"):
        MegatronRLStrategy(async_save=True)  # type: ignore[call-arg]


def test_overlap_needs_what_it_overlaps() -> None:
    with pytest.raises(ValueError, match="it needs distributed_optimizer=True and overlap_grad_reduce=True"):
        DataParallelOptions(overlap_param_gather=True)


# --- C01 -------------------------------------------------------------------------------------------------------------


def _c01(sequence_parallel: bool) -> list[tuple[float, float, float]]:
    """The clipping of known gradients: a sharded weight's, 3 and 4 by rank, and a norm's partial ones, 5 and 7."""
    import torch.distributed as dist

    engine = _engine(
        MegatronLayout(tensor_parallel_size=2, sequence_parallel=sequence_parallel),
        optimizer=partial(torch.optim.SGD, lr=1.0, momentum=0.0),
    )
    engine.forward_backward_batch(_data(), policy_gradient)
    parameters = dict(engine.module.named_parameters())
    sharded = next(p for n, p in parameters.items() if "linear_fc2.weight" in n)
    norm = next(p for n, p in parameters.items() if "final_layernorm.weight" in n)
    for parameter in parameters.values():
        parameter.main_grad.zero_()  # type: ignore[attr-defined]
    rank = dist.get_rank()
    sharded.main_grad[0, 0] = (3.0, 4.0)[rank]  # type: ignore[attr-defined]
    norm.main_grad[0] = (5.0, 7.0)[rank] if sequence_parallel else 12.0  # type: ignore[attr-defined]
    if sequence_parallel:
        from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

        with engine.machine.active():
            group = engine.groups.model_parallel_group
            _allreduce_non_tensor_model_parallel_grads(engine.chunks, engine.bare_chunks[0].config, group)
    whole = float(norm.main_grad[0])  # type: ignore[attr-defined]
    optimizer = engine.optimizer
    with engine.machine.active():
        total = optimizer.prepare_gradients()  # type: ignore[union-attr]
        optimizer.clip_gradients(6.5, total)  # type: ignore[union-attr]
    return [(whole, total, float(norm.main_grad[0]))]  # type: ignore[attr-defined]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_c01_the_norm_is_13_on_every_rank_and_halves_the_gradients(sequence_parallel: bool) -> None:
    """sqrt(3² + 4² + 12²) = 13: not 17.69, replicas counted twice, and not 5 and 7 left apart."""
    for found in run_distributed(_c01, 2, sequence_parallel):
        assert found == [(12.0, pytest.approx(13.0), pytest.approx(6.0, abs=1e-5))]


# --- checkpoints in other layouts ------------------------------------------------------------------------------------

TP2PP2 = MegatronLayout(tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=2)
TP2 = MegatronLayout(tensor_parallel_size=2)
EP2 = MegatronLayout(expert_parallel_size=2)


def _save(layout: MegatronLayout, model: str, folder: Path, **changes: Any) -> dict[str, Tensor]:
    engine = _engine(layout, model=parity_model(model), **changes)
    for _ in range(2):
        engine.train_batch(_own(engine), policy_gradient)
    engine.save_checkpoint(folder / "checkpoint")
    saved = _parameters(engine)
    engine.train_batch(_own(engine), policy_gradient)
    return {**{f"saved.{name}": value for name, value in saved.items()}, **_parameters(engine)}


def _load(layout: MegatronLayout, model: str, folder: Path, **changes: Any) -> dict[str, Tensor]:
    engine = _engine(layout, model=parity_model(model, seed=7), **changes)
    engine.load_checkpoint(folder / "checkpoint")
    loaded = _parameters(engine)
    engine.train_batch(_own(engine), policy_gradient)
    return {**{f"saved.{name}": value for name, value in loaded.items()}, **_parameters(engine)}


@pytest.mark.parametrize(
    ("model", "saved", "loaded", "changes"),
    [
        ("tiny-qwen3-tied", (4, TP2PP2), (1, MegatronLayout()), {}),
        ("tiny-qwen3-moe", (4, TP2PP2), (2, EP2), {}),
        ("tiny-qwen3-moe", (2, EP2), (1, MegatronLayout()), {}),
        ("tiny-qwen3", (2, MegatronLayout()), (4, TP2PP2), {}),
        ("tiny-qwen3", (2, MegatronLayout()), (1, MegatronLayout()), {"data_parallel": DISTRIBUTED}),
        (
            "tiny-qwen3",
            (4, MegatronLayout(tensor_parallel_size=2)),
            (2, MegatronLayout()),
            {"data_parallel": DISTRIBUTED},
        ),
        (
            "tiny-qwen3",
            (2, MegatronLayout(tensor_parallel_size=2)),
            (2, MegatronLayout(pipeline_parallel_size=2)),
            {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
        ),
    ],
    ids=["tp2pp2-to-one", "moe-tp2pp2-to-ep2", "moe-ep2-to-one", "dp2-to-tp2pp2", "zero-dp", "zero-tp-dp", "sgd"],
)
def test_a_checkpoint_goes_on_in_another_layout(
    tmp_path: Path, model: str, saved: tuple[int, MegatronLayout], loaded: tuple[int, MegatronLayout], changes: Any
) -> None:
    """Weights and moments: right after loading nothing has changed, and the third step is the same step."""
    before = run_distributed(_save, saved[0], saved[1], model, tmp_path, **changes)
    for after in run_distributed(_load, loaded[0], loaded[1], model, tmp_path, **changes):
        _assert_close(after, before[0])


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ({"data_parallel": DISTRIBUTED}, {}, "saved with distributed_optimizer=True, this run has False"),
        ({}, {"optimizer": partial(torch.optim.SGD, lr=0.1)}, "is of AdamW, this run trains by SGD"),
        ({"optimizer": None}, {}, "has no optimizer, this optimizer has 1 group"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], message: str
) -> None:
    run_distributed(lambda: _engine(**saved).save_checkpoint(tmp_path / "checkpoint"), 1)
    with pytest.raises(DistributedError, match=message):
        run_distributed(lambda: _engine(**loaded).load_checkpoint(tmp_path / "checkpoint"), 1)


def test_a_distributed_optimizer_does_not_move_between_expert_cuts(tmp_path: Path) -> None:
    run_distributed(_save, 2, EP2, "tiny-qwen3-moe", tmp_path, data_parallel=DISTRIBUTED)
    with pytest.raises(DistributedError, match="megatron-core cannot move that state between layouts that cut experts"):
        run_distributed(_load, 1, MegatronLayout(), "tiny-qwen3-moe", tmp_path, data_parallel=DISTRIBUTED)


class _Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("was-run"),)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "numbers.pt"])
def test_no_file_of_a_checkpoint_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    run_distributed(lambda: _engine().save_checkpoint(tmp_path / "checkpoint"), 1)
    file = tmp_path / "checkpoint" / name
    if name == ".metadata":
        file.write_bytes(pickle.dumps(_Bomb()))
    else:
        torch.save(_Bomb(), file)
    with pytest.raises(DistributedError, match=r"UnpicklingError|Weights only load failed"):
        run_distributed(lambda: _engine().load_checkpoint(tmp_path / "checkpoint"), 1)
    assert not (tmp_path / "was-run").exists()


# --- micro-batches ---------------------------------------------------------------------------------------------------


def test_an_interleaved_pipeline_gets_a_number_of_micro_batches_that_it_can_run() -> None:
    """Three micro-batches on two stages with two chunks each: an empty fourth one is added."""
    layout = MegatronLayout(pipeline_parallel_size=2, virtual_pipeline_size=2)
    model = partial(tiny_model, layers=4)
    expected = _by_torch(model=model())
    for found in run_distributed(_trained, 2, layout, model=model(), micro_batch_size=3):
        _assert_close(found, expected)


def test_a_reference_follows_the_actor() -> None:
    def follow() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        layout = MegatronLayout(tensor_parallel_size=2)
        actor, reference = _engine(layout), _engine(layout, optimizer=None, role="reference", changes=True)
        actor.train_batch(_data(), policy_gradient)
        move_reference(reference, actor, share=1.0)
        return _parameters(actor), _parameters(reference)

    for actor, reference in run_distributed(follow, 2):
        _assert_close(reference, actor, tolerance=0.0)


def test_ranks_of_a_group_with_other_rows_are_told(tmp_path: Path) -> None:
    def other_rows() -> None:
        import torch.distributed as dist

        engine = _engine(MegatronLayout(tensor_parallel_size=2))
        engine.infer_batch(_data().select([dist.get_rank()]))

    with pytest.raises(DistributedError, match="were given different rows"):
        run_distributed(other_rows, 2)


# --- D06 -------------------------------------------------------------------------------------------------------------


def _dtypes() -> tuple[dict[str, torch.dtype], bool]:
    model = parity_model("tiny-qwen3-moe")
    engine = _engine(model=model, compute_dtype=torch.bfloat16)
    for _ in range(2):
        engine.train_batch(_data(), policy_gradient)
    found = _parameters(engine)
    fine = all(
        bool((value != value.bfloat16().float()).any()) for name, value in found.items() if name.endswith("gate.weight")
    )
    return {name: value.dtype for name, value in found.items()}, fine


def test_d06_routers_stay_float32_in_bf16_training_and_in_the_export() -> None:
    dtypes, fine = run_distributed(_dtypes, 1)[0]
    routers = {name for name in dtypes if name.endswith("mlp.gate.weight")}
    assert routers
    assert {dtypes[name] for name in routers} == {torch.float32}
    assert fine, "a router's weights have only bf16's digits"
    assert {dtype for name, dtype in dtypes.items() if name not in routers} == {torch.bfloat16}
