"""A prompt that is computed once for its rollouts: the same log-probs, loss and gradients as one for each."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.experience import policy_gradient
from support.groups import make_groups, make_prompt
from support.tiny import tiny_model
from torch import Tensor, nn
from transformers import AttentionInterface

from lightning_rlhf.batching.shared_prompts import SharedPrefix
from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineRegistry
from lightning_rlhf.engines.hf_model import PackedModel
from lightning_rlhf.engines.packed_attention import packed_attention
from lightning_rlhf.engines.packed_layout import PackedLayout
from lightning_rlhf.engines.shared_stream import shared_stream
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

CPU = torch.device("cpu")
TOLERANCE = 1e-5


def _same_uid(data: Experience) -> Experience:
    data.uids = ["one"] * len(data)
    return data


def _multi_turn() -> Experience:
    """Observations between sampled tokens; one conversation leaves the others' path after 10 of their 16 tokens."""
    data = make_groups([(make_prompt(16, 1), [9, 12, 6, 10])])
    data.tokens[data.cu_seqlens[2] + 10] = (data.tokens[10] + 1) % 64
    for start in data.cu_seqlens[:-1].tolist():
        data.response_mask[start + 18 : start + 20] = False
    data.loss_mask = data.response_mask
    return data


def _identical() -> Experience:
    one = make_groups([(make_prompt(6, 1), [5, 5])])
    return Experience.cat([one.select([0]), one.select([0]), one.select([1]), one.select([0])])


BATCHES: dict[str, Experience] = {
    "eight": make_groups([(make_prompt(24, 1), [8] * 8)]),
    "uneven": make_groups(
        [(make_prompt(20, 1), [3, 17, 1, 9, 30]), (make_prompt(7, 2), [4, 2]), (make_prompt(12, 3), [6, 5, 40])]
    ),
    "of one": make_groups([(make_prompt(11, 1), [5]), (make_prompt(11, 2), [7]), (make_prompt(9, 3), [4, 6])]),
    "same uid, other prompts": _same_uid(make_groups([(make_prompt(9, 1), [4, 5, 6]), (make_prompt(12, 2), [7, 3])])),
    "multi-turn": _multi_turn(),
    "identical": _identical(),
    "one token of prompt": make_groups([([5], [2, 3, 2, 4])]),
}
CUTS: dict[str, dict[str, int]] = {
    "whole": {},
    "count": {"micro_batch_size": 3},
    "tokens": {"max_tokens_per_micro_batch": 70},
}


def _regression(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    assert outputs.values is not None
    return LossOutput(terms=(outputs.values - micro_batch.advantages - 1.0) ** 2)


def _engine(*, share: bool, model_type: str = "language_model", **changes: Any) -> BaseEngine:
    settings: dict[str, Any] = {"model": tiny_model(), "optimizer": partial(torch.optim.SGD, lr=1.0), **changes}
    engine = EngineRegistry.new(model_type, "torch", EngineConfig(share_prompts=share, **settings), device=CPU)
    engine.initialize()
    if model_type == "value_model":  # a head of zeros gives the decoder no gradient
        nn.init.normal_(
            engine.module.get_parameter("hf_model.score.weight"), std=0.1, generator=torch.Generator().manual_seed(3)
        )
    return engine


def _measure(engine: BaseEngine, data: Experience) -> dict[str, Tensor]:
    """Outputs, loss, and every gradient."""
    is_language_model = "log_probs" in engine.module.output_names  # type: ignore[operator]
    outputs = engine.infer_batch(data, entropy=is_language_model)
    found = {name: value for name, value in vars(outputs).items() if value is not None}
    with engine.train_mode():
        metrics = engine.forward_backward_batch(data, policy_gradient if is_language_model else _regression)
    found["loss"] = metrics["loss"].value
    for name, parameter in engine.module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def _assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("data", BATCHES.values(), ids=BATCHES)
def test_outputs_loss_and_gradients_are_those_of_a_prompt_for_each(data: Experience, cut: dict[str, int]) -> None:
    _assert_same(_measure(_engine(share=True, **cut), data), _measure(_engine(share=False), data))


@pytest.mark.parametrize("data", [BATCHES["uneven"], BATCHES["multi-turn"]], ids=["uneven", "multi-turn"])
def test_values_too(data: Experience) -> None:
    mine, theirs = (_measure(_engine(share=share, model_type="value_model"), data) for share in (True, False))
    _assert_same(mine, theirs)
    assert theirs["hf_model.model.layers.0.self_attn.k_proj.weight"].abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_with_recomputed_activations_and_tied_head(family: Any) -> None:
    made = partial(_engine, gradient_checkpointing=True)
    mine, theirs = (
        _measure(made(share=share, model=tiny_model(family=family, tied=True)), BATCHES["uneven"])
        for share in (True, False)
    )
    _assert_same(mine, theirs)


def test_a_step_leaves_the_same_parameters() -> None:
    engines = [_engine(share=share, micro_batch_size=4) for share in (True, False)]
    for engine in engines:
        engine.train_batch(BATCHES["uneven"], policy_gradient)
    mine, theirs = (dict(engine.get_per_tensor_param()) for engine in engines)
    _assert_same(mine, theirs)


# --- the tokens that are computed ------------------------------------------------------------------------------------


class _Counts:
    """Tokens that the decoder is given, call by call."""

    def __init__(self, engine: BaseEngine) -> None:
        self.found: list[int] = []
        model: Any = engine.module
        assert isinstance(model, PackedModel)
        model.hf_model.base_model.register_forward_pre_hook(self._count, with_kwargs=True)  # type: ignore[operator]

    def _count(self, _: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> None:
        self.found.append(kwargs["input_ids"].numel())


def test_a_prompt_is_computed_once_in_a_micro_batch() -> None:
    engine = _engine(share=True, micro_batch_size=8)
    counts = _Counts(engine)
    data = make_groups([(make_prompt(24, 1), [8] * 8), (make_prompt(10, 2), [1, 2, 3, 4, 5, 6, 7, 8])])
    engine.infer_batch(data)
    engine.train_batch(data, policy_gradient)
    assert sorted(counts.found) == [10 + 36] * 2 + [24 + 64] * 2


def test_the_budget_is_of_tokens_that_are_computed() -> None:
    data = make_groups([(make_prompt(24, 1), [8] * 8), (make_prompt(30, 2), [5] * 6)])
    for share, number in ((True, 2), (False, 6)):
        engine = _engine(share=share, max_tokens_per_micro_batch=100)
        counts = _Counts(engine)
        engine.infer_batch(data)
        assert len(counts.found) == number
        assert max(counts.found) <= 100


# --- negative controls: what the comparison would find ---------------------------------------------------------------


def test_a_response_that_takes_positions_from_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = _measure(_engine(share=False), BATCHES["eight"])
    restarting = property(lambda self: PackedLayout(self.cu_seqlens).position_ids)
    wrong = _engine(share=True)
    monkeypatch.setattr("lightning_rlhf.engines.shared_stream.PackedLayout", _subclass(position_ids=restarting))
    mine = _measure(wrong, BATCHES["eight"])
    assert (mine["log_probs"] - theirs["log_probs"]).abs().max() > 1e-3


def test_a_prompt_without_gradients_from_its_responses_is_found() -> None:
    theirs = _measure(_engine(share=False), BATCHES["eight"])
    wrong = _engine(share=True)
    AttentionInterface.register("detached", _detached)
    wrong.module.hf_model.set_attn_implementation("detached")  # type: ignore[union-attr, operator]
    mine = _measure(wrong, BATCHES["eight"])
    torch.testing.assert_close(mine["loss"], theirs["loss"])
    worst = max((mine[name] - theirs[name]).abs().max().item() for name in mine if name.startswith("hf_model"))
    assert worst > 1e-3


def _detached(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    prompt = torch.arange(key.shape[2])[:, None] < 24
    key, value = (torch.where(prompt, states.detach(), states) for states in (key, value))
    return packed_attention(module, query, key, value, mask, **kwargs)


def _subclass(**members: Any) -> type[PackedLayout]:
    return type("Wrong", (PackedLayout,), members)


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 4, 9])
def test_attention_is_that_of_each_sequence_alone(window: int | None) -> None:
    """Two prompts of one length, whose responses go into one call, and a third."""
    draw = torch.Generator().manual_seed(0)
    lengths, prefixes = [6, 6, 3, 2, 3, 8, 1], [(0, 0), (0, 0), (0, 6), (0, 6), (6, 6), (0, 0), (17 + 3, 8)]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    query, key, value = (torch.randn(1, heads, starts[-1], 8, generator=draw) for heads in (4, 2, 2))
    layout = PackedLayout(torch.tensor(starts), prefixes)
    found, _ = packed_attention(nn.Identity(), query, key, value, None, packed_layout=layout, sliding_window=window)
    for (first, number), start, length in zip(prefixes, starts, lengths, strict=False):
        index = [*range(first, first + number), *range(start, start + length)]
        alone = PackedLayout(torch.tensor([0, len(index)]))
        states = [states[:, :, index] for states in (query, key, value)]
        expected, _ = packed_attention(nn.Identity(), *states, None, packed_layout=alone, sliding_window=window)
        torch.testing.assert_close(found[0, start : start + length], expected[0, number:])
    assert len(layout.groups) < len(lengths)


def test_keys_of_a_variable_length_kernel_stand_behind_theirmake_prompt() -> None:
    stream = shared_stream(torch.tensor([0, 5, 9, 13]), [SharedPrefix(rows=(0, 2), length=3)])
    assert stream.kept.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12]
    assert stream.places.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 9]
    assert stream.layout.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 3]
    index, starts, longest = stream.layout.keys
    assert index is not None
    assert index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 9]
    assert (starts.tolist(), longest) == ([0, 3, 8, 12, 16], 5)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_back_end_without_it_refuses(tmp_path: Path) -> None:
    class Plain(EngineRegistry.get("language_model", "torch", "cpu")):  # type: ignore[misc]
        can_share_prompts = False

    with pytest.raises(
        ValueError, match=r"share_prompts=True does not work with Plain.*Use the fsdp2 or torch back end"
    ):
        Plain(EngineConfig(model=tmp_path, share_prompts=True), device=CPU)
