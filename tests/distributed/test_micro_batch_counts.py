"""What engines say that they computed: numbers by hand, and the tokens that their embeddings were given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.experience import make_experience, policy_gradient
from support.fork import run_distributed
from support.groups import make_groups, make_prompt
from support.megatron_imports import megatron_is_imported  # noqa: F401
from support.tiny import tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineRegistry
from lightning_rlhf.contracts.micro_batch_counts import MicroBatchCounts
from lightning_rlhf.engines.megatron.layout import MegatronLayout
from lightning_rlhf.metrics import reduce_metrics
from lightning_rlhf.types import Experience

CPU = torch.device("cpu")
LENGTHS = [5, 30, 8, 17, 3, 40, 12, 10]
"""125 tokens."""

Layout = dict[str, Any]


def _mesh(**sizes: int) -> Layout:
    return {"mesh": init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))}


def _engine(backend: str, layout: Layout, **settings: Any) -> BaseEngine:
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    config = EngineConfig(model=tiny_model(), optimizer=optimizer, **settings)
    engine = EngineRegistry.new("language_model", backend, config, device=CPU, **layout)
    engine.initialize()
    return engine


def _seen(engine: BaseEngine) -> list[int]:
    """Tokens of each forward from now on, as the embedding is given them."""
    sizes: list[int] = []

    def note(module: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        sizes.append((arguments[0] if arguments else named["input_ids"]).numel())

    names = ("embed_tokens", "embedding")  # of transformers and megatron
    embedding = next(module for name, module in engine.module.named_modules() if name.split(".")[-1] in names)
    embedding.register_forward_pre_hook(note, with_kwargs=True)
    return sizes


def _trained(backend: str, layout: Callable[[], Layout], share: Callable[[int], Experience], settings: Any) -> Any:
    engine = _engine(backend, layout(), **settings)
    assert engine.last_counts is None
    sizes = _seen(engine)
    metrics = engine.train_batch(share(engine.data_parallel_rank), policy_gradient)
    # numbers of the layout are not among those that are equal in all layouts
    assert not {"padding_fraction", "num_micro_batches"} & metrics.keys()
    return engine.last_counts, sizes


def _everything(rank: int) -> Experience:
    return make_experience(LENGTHS)


def _all_on_the_first(rank: int) -> Experience:
    return make_experience(LENGTHS).select([] if rank else list(range(len(LENGTHS))))


def test_one_process_pads_nothing() -> None:
    counts, sizes = _trained("torch", dict, _everything, {"max_tokens_per_micro_batch": 48})
    assert counts == MicroBatchCounts(num_micro_batches=3, num_tokens=125, num_padding=0)
    assert (len(sizes), sum(sizes)) == (3, 125)


def test_a_shared_prompt_counts_once_in_each_micro_batch() -> None:
    """A prompt of 20 tokens with three responses of 4 in one micro-batch, and with two of them in another."""
    data = make_groups([(make_prompt(20, 1), [4, 4, 4])])
    whole, sizes = _trained("torch", dict, lambda _: data, {"share_prompts": True})
    assert whole == MicroBatchCounts(num_micro_batches=1, num_tokens=20 + 12, num_padding=0)
    assert sizes == [32]
    cut, sizes = _trained("torch", dict, lambda _: data, {"share_prompts": True, "micro_batch_size": 2})
    assert cut == MicroBatchCounts(num_micro_batches=2, num_tokens=28 + 24, num_padding=0)
    assert sorted(sizes) == [24, 28]


def test_a_rank_without_rows_computes_a_token_for_each_micro_batch() -> None:
    layout = partial(_mesh, dp_shard=2)
    found = run_distributed(_trained, 2, "fsdp2", layout, _all_on_the_first, {"micro_batch_size": 4})
    (busy, busy_sizes), (idle, idle_sizes) = found
    assert busy == MicroBatchCounts(num_micro_batches=2, num_tokens=125, num_padding=0)
    assert idle == MicroBatchCounts(num_micro_batches=2, num_tokens=2, num_padding=2)
    assert (sum(busy_sizes), idle_sizes) == (125, [1, 1])


@pytest.mark.parametrize(
    ("backend", "layout", "expected", "given"),
    [
        # the stream of 125 tokens is padded to an even number
        ("ulysses", partial(_mesh, dp_replicate=1, dp_shard=1, sp=2), (126, 1), [63, 63]),
        # each sequence is padded to a multiple of 4: 8 + 32 + 8 + 20 + 4 + 40 + 12 + 12
        ("megatron", lambda: {"layout": MegatronLayout(context_parallel_size=2)}, (136, 11), [68, 68]),
        # tensor parallelism alone cuts no tokens
        ("megatron", lambda: {"layout": MegatronLayout(tensor_parallel_size=2)}, (125, 0), [125, 125]),
    ],
    ids=["ulysses", "context-parallel", "tensor-parallel"],
)
def test_a_group_that_shares_rows_counts_them_once(
    backend: str, layout: Callable[[], Layout], expected: tuple[int, int], given: list[int]
) -> None:
    tokens, padding = expected
    ranks = run_distributed(_trained, 2, backend, layout, _everything, {})
    for counts, _ in ranks:
        assert counts == MicroBatchCounts(num_micro_batches=1, num_tokens=tokens, num_padding=padding)
    assert [sum(sizes) for _, sizes in ranks] == given


def test_the_share_of_all_ranks_is_padding_over_tokens() -> None:
    """Not the mean of the ranks' shares, which is (0 + 1) / 2."""

    def joined() -> dict[str, float]:
        engine = _engine("fsdp2", _mesh(dp_shard=2), micro_batch_size=4)
        engine.train_batch(_all_on_the_first(dist.get_rank()), policy_gradient)
        assert engine.last_counts is not None
        return reduce_metrics(engine.last_counts.metrics(CPU), engine.data_parallel_group, distributed=True)

    for found in run_distributed(joined, 2):
        assert found == {"padding_fraction": pytest.approx(2 / 127), "num_micro_batches": 2.0}
