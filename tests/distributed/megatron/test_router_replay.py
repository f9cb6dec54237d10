"""Expert choices: what is recorded, what replaying them does, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.megatron import VOCAB, build, forward_backward, pack_sequences, reference, sequences, tiny, zigzag
from torch import Tensor

from lightning_rlhf.engines.megatron.backend import choose_backend
from lightning_rlhf.engines.megatron.export import export_parameters
from lightning_rlhf.engines.megatron.layout import MegatronLayout
from lightning_rlhf.engines.megatron.router_replay import FREE, ExpertChoices

EXPERTS, LAYERS, TOPK = 4, 4, 2


def draw() -> list[list[Tensor]]:
    """Other experts than any router would take, for each token and layer; some tokens are left free."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for pack in sequences().weights:
        scores = [torch.rand(len(one), LAYERS, EXPERTS, generator=generator) for one in pack]
        found.append([one.topk(TOPK).indices.to(torch.int32) for one in scores])
        found[-1][0][2] = FREE
    return found


def replayed(family: str, layout: MegatronLayout, options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients with the drawn choices; what is recorded meanwhile must be what was drawn."""
    from megatron.core import parallel_state

    share = parallel_state  # named once, used after the groups are made
    with choose_backend("cpu").active():
        chunks = build(family, layout, **options)
        experts = ExpertChoices(chunks)
        mine = slice(share.get_data_parallel_rank(), None, share.get_data_parallel_world_size())
        given = [zigzag(pack, layout, fill=FREE) for pack in draw()[mine]]
        with experts.replaying(given), experts.recording() as recorded:
            loss = forward_backward(chunks, layout)
        assert len(recorded) == len(given)
        dense = [layer for layer in range(LAYERS) if family == "qwen3_moe_mixed" and layer == 1]
        for one, other in zip(recorded, given, strict=True):
            assert (one[:, dense] == FREE).all()
            sparse = [layer for layer in range(LAYERS) if layer not in dense]
            known = (other != FREE).all(dim=(1, 2))
            assert torch.equal(one[known][:, sparse], other[known][:, sparse])
            assert ((one[:, sparse] >= 0) & (one[:, sparse] < EXPERTS)).all()
        config = tiny(family).config
        gradients = export_parameters(chunks, hf_config=config, tensor_of=lambda p: p.main_grad)
        return loss, {name: tensor.clone() for name, tensor in gradients}


LAYOUTS = {
    "tp2_ep2": (
        2,
        {
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "expert_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
        {},
    ),
    "cp2": (2, {"context_parallel_size": 2, "expert_parallel_size": 2}, {}),
    "pp2_vpp2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}, {}),
    "recomputed": (1, {}, {"recompute": "full"}),
    "recomputed_pp2_dp2": (4, {"pipeline_parallel_size": 2}, {"recompute": "full"}),
}


@pytest.mark.parametrize(("ranks", "sizes", "options"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3_moe_mixed"])
def test_replayed_choices_are_the_same_model_in_every_layout(
    family: str, ranks: int, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    plain = reference(family)
    ((loss, gradients),) = run_distributed(replayed, 1, family, MegatronLayout(), {})
    assert abs(loss - plain.loss) > 1e-3, "the drawn choices must matter"
    for found, other in run_distributed(replayed, ranks, family, MegatronLayout(**sizes), options):
        assert abs(found - loss) < 1e-5
        assert other.keys() == gradients.keys()
        assert max(float((other[name] - gradients[name]).abs().max()) for name in gradients) < 1e-5
    assert float(gradients["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-4, "routers learn under replay"


def in_bf16() -> tuple[float, float]:
    """Mean difference of bf16's log-probs from fp32's: with own choices, and with those of fp32."""
    layout = MegatronLayout()
    with choose_backend("cpu").active(), torch.no_grad():
        full = build("qwen3_moe", layout)
        half = build("qwen3_moe", layout, compute_dtype=torch.bfloat16)
        of_full, of_half = ExpertChoices(full), ExpertChoices(half)
        batches = [pack_sequences(one, other, layout) for one, other in zip(*vars(sequences()).values(), strict=True)]

        def log_probs(chunks: list[Any]) -> Tensor:
            outputs = [chunks[0](one.tokens, one.tokens, None, packed_seq_params=one.params)[0] for one in batches]
            labels = torch.cat([one.labels[0] for one in batches])
            return torch.cat(outputs).float()[:, :VOCAB].log_softmax(-1).gather(1, labels[:, None])

        with of_full.recording() as choices, of_half.recording() as unused:
            expected = log_probs(full)
        assert unused == []
        own = log_probs(half)
        with of_half.replaying(choices):
            same = log_probs(half)
    return float((own - expected).abs().max()), float((same - expected).abs().max())


def test_replay_takes_away_what_flipped_choices_do() -> None:
    reference("qwen3_moe")
    ((own, same),) = run_distributed(in_bf16, 1)
    assert same < own / 3, (own, same)


def refused() -> None:
    layout = MegatronLayout()
    with choose_backend("cpu").active():
        with pytest.raises(ValueError, match="has none"):
            ExpertChoices(build("qwen3", layout))
        chunks = build("qwen3_moe", layout)
        experts = ExpertChoices(chunks)
        with (
            pytest.raises(ValueError, match=r"num_local, 4, 2.* got \(8, 3, 2\)"),
            experts.replaying([torch.zeros(8, 3, 2)]),
        ):
            pass
        with pytest.raises(RuntimeError, match="choices of 8 tokens"), experts.replaying([torch.zeros(8, 4, 2)]):
            forward_backward(chunks, layout)
        given = [zigzag(pack, layout, fill=FREE) for pack in draw()[:1]]
        with pytest.raises(RuntimeError, match="no choices were given: there are 1"), experts.replaying(given):
            forward_backward(chunks, layout)


def test_choices_that_do_not_fit() -> None:
    reference("qwen3"), reference("qwen3_moe")
    run_distributed(refused, 1)
