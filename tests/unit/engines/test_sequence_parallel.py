"""Dealing heads and cutting streams: by hand, without processes."""

from __future__ import annotations

import pytest
import torch
from support.tiny import tiny_model

from lightning_rlhf.engines.packed_layout import PackedLayout
from lightning_rlhf.engines.sequence_parallel import ULYSSES_ATTENTION, check_heads, cut_slice, pad_to_multiple


@pytest.mark.parametrize("sp_size", [1, 2, 4, 8, 40])
def test_c05_40_heads_and_8_key_value_heads_are_dealt_to_ranks_that_fit(sp_size: int) -> None:
    check_heads(num_heads=40, num_kv_heads=8, sp_size=sp_size)


@pytest.mark.parametrize("sp_size", [5, 10, 16, 20])
def test_c05_and_not_to_others(sp_size: int) -> None:
    with pytest.raises(ValueError, match=r"takes sp_size 1, 2, 4, 8, 40\.") as caught:
        check_heads(num_heads=40, num_kv_heads=8, sp_size=sp_size)
    message = f"sp_size={sp_size} does not fit a model with 40 attention heads and 8 key-value heads"
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("heads", "kv_heads", "sp_size"), [(3, 3, 2), (9, 3, 2), (6, 3, 2), (4, 4, 8)])
def test_g03_other_numbers_are_refused(heads: int, kv_heads: int, sp_size: int) -> None:
    with pytest.raises(ValueError, match=f"sp_size={sp_size} .* {heads} attention heads and {kv_heads} key-value"):
        check_heads(num_heads=heads, num_kv_heads=kv_heads, sp_size=sp_size)


def _cut(cu_seqlens: list[int], size: int) -> list[dict[str, list[int]]]:
    starts = torch.tensor(cu_seqlens)
    tokens = torch.arange(10, 10 + cu_seqlens[-1])
    layout = PackedLayout(pad_to_multiple(starts, size))
    parts = [
        cut_slice(tokens, layout, torch.ones_like(tokens, dtype=torch.bool), rank=rank, size=size)
        for rank in range(size)
    ]
    return [{name: value.tolist() for name, value in vars(part).items()} for part in parts]


def test_c08_seven_tokens_on_two_ranks() -> None:
    first, second = _cut([0, 7], 2)
    assert (first["tokens"], second["tokens"]) == ([10, 11, 12, 13], [14, 15, 16, 0])
    assert (first["labels"], second["labels"]) == ([11, 12, 13, 14], [15, 16, 0, 0])
    assert (first["scored"], second["scored"]) == ([True] * 4, [True, True, False, False])
    assert (first["position_ids"], second["position_ids"]) == ([0, 1, 2, 3], [4, 5, 6, 0])


def test_sequences_that_cross_a_border_or_fill_it_exactly() -> None:
    first, second, third = _cut([0, 3, 3, 5, 9], 3)
    assert [part["tokens"] for part in (first, second, third)] == [[10, 11, 12], [13, 14, 15], [16, 17, 18]]
    assert [part["labels"] for part in (first, second, third)] == [[11, 12, 0], [14, 0, 16], [17, 18, 0]]
    assert [part["position_ids"] for part in (first, second, third)] == [[0, 1, 2], [0, 1, 0], [1, 2, 3]]


def test_padding_of_several_tokens_is_a_sequence_of_its_own() -> None:
    parts = _cut([0, 1], 4)
    assert [part["position_ids"] for part in parts] == [[0], [0], [1], [2]]
    assert not any(value for part in parts for value in part["scored"])


def test_the_mask_belongs_to_the_token_that_is_scored() -> None:
    mask = torch.tensor([False, False, True, True, False, True])  # two sequences of three; [5] is the last one's last
    layout = PackedLayout(torch.tensor([0, 3, 6]))
    parts = [cut_slice(torch.arange(6), layout, mask, rank=rank, size=2) for rank in range(2)]
    assert [part.scored.tolist() for part in parts] == [[False, True, False], [False, True, False]]


def test_a_stream_that_a_rank_holds_whole_needs_no_group() -> None:
    model = tiny_model().eval()
    expected = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    model.set_attn_implementation(ULYSSES_ATTENTION)
    layout = PackedLayout(torch.tensor([0, 3]))
    found = model(
        input_ids=torch.tensor([[5, 6, 7]]),
        position_ids=layout.position_ids[None],
        use_cache=False,
        packed_layout=layout,
    ).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
