from __future__ import annotations

import pytest
import torch

from lightning_rlhf.parity.batch import LENGTHS, make_batch, rows_of_rank, with_other_policies
from lightning_rlhf.parity.measure import in_batch_order
from lightning_rlhf.parity.tiny_models import TINY_MODELS, tiny_model


def test_the_batch_is_fixed_and_one_row_trains_nothing() -> None:
    batch, again = make_batch(96), make_batch(96)
    assert batch.lengths.tolist() == list(LENGTHS)
    assert torch.equal(batch.tokens, again.tokens)
    silent = [row for row in range(len(batch)) if not batch.select([row]).loss_mask.any()]
    assert silent == [7]
    assert batch.loss_weights is not None
    assert float(batch.loss_weights.sum()) == pytest.approx(1.0)
    assert bool((batch.loss_weights[~batch.loss_mask] == 0).all())
    assert bool(batch.advantages.isfinite().all())
    # groups of three, centred: without the failed row a group has two
    per_row = [float(batch.select([row]).advantages[-1]) for row in range(len(batch))]
    assert sum(per_row[:3]) == pytest.approx(0.0, abs=1e-6)
    assert per_row[6] + per_row[8] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12, 16])
def test_ranks_share_all_rows_unevenly_in_tokens(size: int) -> None:
    rows = [rows_of_rank(rank, size) for rank in range(size)]
    assert sorted(row for share in rows for row in share) == list(range(len(LENGTHS)))
    tokens = [sum(LENGTHS[row] for row in share) for share in rows]
    assert tokens == sorted(tokens, reverse=True)


def test_other_policies_are_near_and_the_same_in_every_process() -> None:
    batch = make_batch(96)
    log_probs = torch.full((batch.num_tokens,), -3.0)
    first, second = with_other_policies(batch, log_probs), with_other_policies(batch, log_probs)
    assert first.old_log_probs is not None
    assert second.old_log_probs is not None
    assert first.ref_log_probs is not None
    assert torch.equal(first.old_log_probs, second.old_log_probs)
    ratio = (log_probs - first.old_log_probs).exp()[batch.response_mask]
    assert 0.1 < float(((ratio - 1).abs() > 0.2).float().mean()) < 0.9
    assert bool((first.ref_log_probs[~batch.response_mask] == 0).all())


def test_values_of_some_rows_go_back_to_their_places() -> None:
    batch = make_batch(96)
    starts = batch.cu_seqlens.tolist()
    rows = [4, 0]  # of 3 and 5 tokens
    placed = in_batch_order(batch, rows, torch.arange(8.0))
    assert placed[starts[4] : starts[5]].tolist() == [0, 1, 2]
    assert placed[:5].tolist() == [3, 4, 5, 6, 7]
    assert int(placed.isnan().sum()) == batch.num_tokens - 8


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_models_are_the_same_each_time_and_leave_the_random_state(name: str) -> None:
    state = torch.random.get_rng_state()
    first, second = tiny_model(name), tiny_model(name)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    tied = first.get_output_embeddings().weight is first.get_input_embeddings().weight
    assert tied is ("tied" in name)
    assert first.config.num_key_value_heads == 2
    assert any("expert" in parameter for parameter, _ in first.named_parameters()) is ("moe" in name)
