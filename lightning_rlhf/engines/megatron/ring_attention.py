"""Attention of ranks that pass keys and values around in a ring; each holds its own and one other's at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.engines.megatron.attention import PackedCoreAttention

TILE = 512
"""Queries and keys whose scores are held at a time."""


class RingAttention(PackedCoreAttention):
    """Keys and values go round; what each rank attends is merged by the running maximum and sum of the softmax.

    The memory of a layer depends on a rank's own tokens alone, not on how many ranks there are.
    """

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        chunk_lengths = tuple(length // (2 * self.group.size()) for length in lengths)
        attended: Tensor = _RingFunction.apply(  # type: ignore[no-untyped-call]
            query, key, value, self.group, chunk_lengths, self.scale
        )
        return attended


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, chunk_lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        grouped = _by_kv_head(query, key)
        output = torch.zeros(grouped.shape, dtype=torch.float32, device=query.device)
        lse = torch.full(grouped.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        ring = _Ring(group)
        travelling = torch.stack([key, value])
        for step in range(ring.size):
            arriving = ring.pass_on(travelling) if step < ring.size - 1 else None
            source = (ring.rank - step) % ring.size
            for queries, keys, diagonal in _pairs(chunk_lengths, ring.rank, source):
                _attend_pair(grouped, travelling, output, lse, queries, keys, diagonal, scale)
            if arriving is not None:
                travelling = arriving.wait()
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.group, ctx.chunk_lengths, ctx.scale = group, chunk_lengths, scale
        return output.reshape(query.shape).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        grouped = _by_kv_head(query, key)
        grad = grad_outputs[0].reshape(grouped.shape).float()
        # the part of a softmax's gradient that is the same for all keys of a query
        shared = (grad * output).sum(-1)
        grad_query = torch.zeros_like(output)
        ring = _Ring(ctx.group)
        travelling = torch.stack([key, value])
        grads = torch.zeros(travelling.shape, dtype=torch.float32, device=key.device)
        for step in range(ring.size):
            arriving = ring.pass_on(travelling) if step < ring.size - 1 else None
            source = (ring.rank - step) % ring.size
            for pair in _pairs(ctx.chunk_lengths, ring.rank, source):
                _backward_pair(grouped, travelling, grad, shared, lse, grad_query, grads, pair, ctx.scale)
            if arriving is not None:
                travelling = arriving.wait()
            # the gradients travel with their keys and values, one step behind, and so come home after all steps
            grads = ring.pass_on(grads).wait()
        grad_key, grad_value = grads
        return (
            grad_query.reshape(query.shape).to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            None,
            None,
            None,
        )


class _Ring:
    """Passes tensors to the next rank."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def pass_on(self, tensor: Tensor) -> _Arriving:
        received = torch.empty_like(tensor)
        following = dist.get_global_rank(self._group, (self.rank + 1) % self.size)
        previous = dist.get_global_rank(self._group, (self.rank - 1) % self.size)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, following, self._group),
                dist.P2POp(dist.irecv, received, previous, self._group),
            ]
        )
        return _Arriving(works, tensor, received)


class _Arriving:
    """A tensor on its way; what is sent is kept alive until it is there."""

    def __init__(self, works: list[Any], sent: Tensor, received: Tensor) -> None:
        self._works, self._sent, self._received = works, sent, received

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _by_kv_head(query: Tensor, key: Tensor) -> Tensor:
    """``[tokens, heads, head_dim]`` to ``[tokens, kv_heads, heads / kv_heads, head_dim]``."""
    return query.reshape(len(query), key.shape[1], -1, query.shape[-1])


def _pairs(chunk_lengths: tuple[int, ...], rank: int, source: int) -> list[tuple[slice, slice, bool]]:
    """Which of this rank's queries see which of another's keys: (queries, keys, whether they are the same chunk).

    Rank ``r`` holds chunks ``r`` and ``2 * cp - 1 - r``. An early chunk comes before every late one, early chunks are
    in the order of the ranks, and late ones in the opposite order.
    """
    found = []
    start = 0
    for length in chunk_lengths:
        early, late = slice(start, start + length), slice(start + length, start + 2 * length)
        if rank == source:
            found += [(early, early, True), (late, early, False), (late, late, True)]
        elif rank > source:
            found += [(early, early, False), (late, early, False)]
        else:
            found += [(late, early, False), (late, late, False)]
        start += 2 * length
    return found


def _tiles(queries: slice, keys: slice, diagonal: bool) -> list[tuple[slice, slice, Tensor | None]]:
    """Cut a pair of chunks into tiles; tiles that nothing is seen in are left out."""
    found: list[tuple[slice, slice, Tensor | None]] = []
    for first in range(queries.start, queries.stop, TILE):
        rows = slice(first, min(first + TILE, queries.stop))
        for start in range(keys.start, keys.stop, TILE):
            columns = slice(start, min(start + TILE, keys.stop))
            if not diagonal or columns.stop - 1 <= rows.start:
                found.append((rows, columns, None))
            elif columns.start < rows.stop:
                hidden = torch.arange(columns.start, columns.stop) > torch.arange(rows.start, rows.stop)[:, None]
                found.append((rows, columns, hidden))
    return found


def _scores(query: Tensor, key: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """``[queries, kv_heads, shared, keys]`` fp32."""
    scores = torch.einsum("qgnd,kgd->qgnk", query.float(), key.float()) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden.to(scores.device)[:, None, None], -torch.inf)
    return scores


def _attend_pair(
    query: Tensor,
    keys_and_values: Tensor,
    output: Tensor,
    lse: Tensor,
    queries: slice,
    keys: slice,
    diagonal: bool,
    scale: float,
) -> None:
    """Add what one chunk of keys gives to ``output`` and ``lse``, in place."""
    for rows, columns, hidden in _tiles(queries, keys, diagonal):
        scores = _scores(query[rows], keys_and_values[0, columns], hidden, scale)
        new_lse = torch.logaddexp(lse[rows], scores.logsumexp(-1))
        weights = (scores - new_lse[..., None]).exp()
        added = torch.einsum("qgnk,kgd->qgnd", weights, keys_and_values[1, columns].float())
        output[rows] = output[rows] * (lse[rows] - new_lse).exp()[..., None] + added
        lse[rows] = new_lse


def _backward_pair(
    query: Tensor,
    keys_and_values: Tensor,
    grad: Tensor,
    shared: Tensor,
    lse: Tensor,
    grad_query: Tensor,
    grads: Tensor,
    pair: tuple[slice, slice, bool],
    scale: float,
) -> None:
    """Add one pair's gradients in place; the softmax's weights are computed again from ``lse``."""
    for rows, columns, hidden in _tiles(*pair):
        key, value = keys_and_values[0, columns].float(), keys_and_values[1, columns].float()
        weights = (_scores(query[rows], key, hidden, scale) - lse[rows][..., None]).exp()
        grads[1, columns] += torch.einsum("qgnk,qgnd->kgd", weights, grad[rows])
        grad_weights = torch.einsum("qgnd,kgd->qgnk", grad[rows], value)
        grad_scores = weights * (grad_weights - shared[rows][..., None]) * scale
        grad_query[rows] += torch.einsum("qgnk,kgd->qgnd", grad_scores, key)
        grads[0, columns] += torch.einsum("qgnk,qgnd->kgd", grad_scores, query[rows].float())
