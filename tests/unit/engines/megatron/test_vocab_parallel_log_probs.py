"""Log-probs over a head in shards, against the softmax written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from support.fork import run_distributed
from torch import Tensor

from lightning_rlhf.engines.megatron.log_probs import vocab_parallel_log_probs

T, H, VOCAB = 13, 8, 21


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, H, generator=draw), torch.randn(VOCAB, H, generator=draw)
    labels = torch.randint(0, VOCAB, (T,), generator=draw)
    labels[-1] = VOCAB - 1  # the last token of the vocabulary, beside the padding
    outer = torch.randn(2, T, generator=draw)
    return hidden.to(dtype), weight.to(dtype), labels, outer


def _by_hand(temperature: float) -> dict[str, Tensor]:
    hidden, weight, labels, outer = _inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    chosen = log_p[torch.arange(T), labels]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (chosen * outer[0] + entropy * outer[1]).sum().backward()
    return {"log_probs": chosen, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}  # type: ignore[dict-item]


def _shard(per_rank: int, temperature: float, chunk_size: int) -> dict[str, Tensor]:
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, size = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    hidden, weight, labels, outer = _inputs()
    padded = torch.full((per_rank * size, H), 50.0)  # what a padded row must never show in
    padded[:VOCAB] = weight
    shard = padded[rank * per_rank : (rank + 1) * per_rank].clone().requires_grad_()
    hidden.requires_grad_()
    before = (hidden.detach().clone(), shard.detach().clone())
    log_probs, entropy = vocab_parallel_log_probs(
        hidden,
        shard,
        labels,
        vocab_size=VOCAB,
        group=group,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=True,
    )
    assert entropy is not None
    (log_probs * outer[0] + entropy * outer[1]).sum().backward()
    assert torch.equal(hidden, before[0])
    assert torch.equal(shard, before[1])
    assert hidden.grad is not None
    assert shard.grad is not None
    total = hidden.grad.clone()
    if group:
        dist.all_reduce(total)
    found = {"log_probs": log_probs, "entropy": entropy, "hidden": total, "weight": shard.grad}
    return {name: value.detach() for name, value in found.items()}


@pytest.mark.parametrize(
    ("world_size", "per_rank"), [(1, 21), (1, 24), (2, 11), (2, 12), (4, 8)], ids=lambda value: str(value)
)
@pytest.mark.parametrize(("temperature", "chunk_size"), [(1.0, 512), (0.7, 5)])
def test_shards_are_the_whole_softmax(world_size: int, per_rank: int, temperature: float, chunk_size: int) -> None:
    """Four ranks with eight rows for 21 tokens: the third holds three of padding, the fourth nothing else."""
    ranks = (
        [_shard(per_rank, temperature, chunk_size)]
        if world_size == 1
        else run_distributed(_shard, world_size, per_rank, temperature, chunk_size)
    )
    expected = _by_hand(temperature)
    for found in ranks:
        for name in ("log_probs", "entropy", "hidden"):
            torch.testing.assert_close(found[name], expected[name].detach(), atol=1e-5, rtol=1e-5)
    weight = torch.cat([found["weight"] for found in ranks])
    torch.testing.assert_close(weight[:VOCAB], expected["weight"], atol=1e-5, rtol=1e-5)
    assert bool((weight[VOCAB:] == 0).all()), "padding has a gradient"


def test_e10_padded_columns_have_no_probability() -> None:
    """Five tokens in a model of eight, whose padded logits are the largest."""
    weight = torch.tensor([0.0] * 5 + [9.0] * 3)[:, None]
    for label in range(5):
        found, entropy = vocab_parallel_log_probs(
            torch.ones(1, 1), weight, torch.tensor([label]), vocab_size=5, group=None, entropy=True
        )
        assert entropy is not None
        assert found.item() == pytest.approx(-1.6094, abs=1e-4)
        assert entropy.item() == pytest.approx(math.log(5), abs=1e-6)
    # negative control: with the padding counted, the same token has next to no probability
    wrong, _ = vocab_parallel_log_probs(torch.ones(1, 1), weight, torch.tensor([0]), vocab_size=8, group=None)
    assert wrong.item() == pytest.approx(-10.0988, abs=1e-3)


def test_bf16_inputs_give_fp32_log_probs() -> None:
    hidden, weight, labels, _ = _inputs(torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    found, _ = vocab_parallel_log_probs(hidden, weight, labels, vocab_size=VOCAB, group=None)
    found.sum().backward()
    assert found.dtype is torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype is torch.bfloat16
    expected = (hidden @ weight.t()).float().log_softmax(-1)[torch.arange(T), labels]
    torch.testing.assert_close(found, expected)


def test_no_rows() -> None:
    found, entropy = vocab_parallel_log_probs(
        torch.zeros(0, H, requires_grad=True),
        torch.zeros(4, H),
        torch.zeros(0, dtype=torch.int64),
        vocab_size=4,
        group=None,
        entropy=True,
    )
    assert found.shape == (0,)
    assert entropy is not None
    found.sum().backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "positive"),
        ({"chunk_size": 0}, "positive"),
        ({"vocab_size": 5}, r"vocab_size=5 does not fit 1 rank\(s\) with 4 rows each"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "Expected hidden"),
    ],
)
def test_refused(changes: dict[str, object], message: str) -> None:
    arguments = {
        "hidden": torch.zeros(2, H),
        "weight": torch.zeros(4, H),
        "labels": torch.zeros(2, dtype=torch.int64),
        "vocab_size": 4,
        "group": None,
    }
    with pytest.raises(ValueError, match=message):
        vocab_parallel_log_probs(**{**arguments, **changes})  # type: ignore[arg-type]
