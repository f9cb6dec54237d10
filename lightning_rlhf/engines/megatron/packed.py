"""From sequences back to back to what one context-parallel rank computes on, and the way back.

Megatron's packed layout (``thd``): each sequence is padded on the right, cut into ``2 cp`` equal pieces, and rank ``r``
holds pieces ``r`` and ``2 cp - 1 - r`` of each (zigzag), so that causal attention costs all ranks the same. Padding
comes after a sequence's last token, where no causal attention of a real token looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PackedMicroBatch:
    """One micro-batch as one rank of a context-parallel group holds it.

    Attributes:
        tokens: ``[1, num_local]`` int64, this rank's pieces, 0 on padding.
        is_padding: ``[1, num_local]`` bool.
        position_ids: ``[1, num_local]`` int64, each token's index in its own sequence.
        labels: ``[num_scored]`` int64, the next token of each position in ``scored``.
        scored: ``[num_scored]`` int64, which local positions predict a token that is asked for.
        cu_seqlens_padded: ``[B+1]`` int32, where each sequence's padded tokens start, over all ranks.
        max_length: longest padded sequence.
        predictors: ``[num_tokens]`` int64, for each token of the batch the place, in the ranks' positions one after the
            other, that predicts it; only meant where ``asked``.
        asked: ``[num_tokens]`` bool, tokens whose outputs are asked for.
        places: ``[num_tokens]`` int64, for each token of the batch its own place in those positions.
    """

    tokens: Tensor
    is_padding: Tensor
    position_ids: Tensor
    labels: Tensor
    scored: Tensor
    cu_seqlens_padded: Tensor
    max_length: int
    predictors: Tensor
    asked: Tensor
    places: Tensor

    @property
    def num_local(self) -> int:
        """Positions on this rank, padding among them."""
        return self.tokens.shape[1]

    @property
    def num_real(self) -> int:
        """Positions on this rank that hold a token of the batch."""
        return self.num_local - int(self.is_padding.sum())

    def packed_seq_params(self) -> Any:
        """The sequences' borders as megatron's attention takes them: padding is part of its sequence."""
        from megatron.core.packed_seq_params import PackedSeqParams

        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens_padded,
            cu_seqlens_kv=self.cu_seqlens_padded,
            cu_seqlens_q_padded=self.cu_seqlens_padded,
            cu_seqlens_kv_padded=self.cu_seqlens_padded,
            max_seqlen_q=self.max_length,
            max_seqlen_kv=self.max_length,
        )

    def at_tokens(self, columns: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
        """From scores at this rank's predicting positions to scores at the tokens, on every rank. Collective.

        Args:
            columns: ``[num_scored, k]``.
            group: the context-parallel ranks; None for one.

        Returns:
            ``[num_tokens, k]`` in the batch's order, 0 where nothing is asked.
        """
        local = columns.new_zeros(self.num_local, columns.shape[1]).index_copy(0, self.scored, columns)
        whole = local if group is None else gather_for_all(local, group)
        return torch.where(self.asked[:, None], whole[self.predictors], 0.0)

    def of_tokens(self, positions: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
        """From what this rank's positions hold to what the tokens hold, on every rank; no gradients. Collective.

        Args:
            positions: ``[num_local, ...]``.
            group: the context-parallel ranks; None for one.

        Returns:
            ``[num_tokens, ...]`` in the batch's order.
        """
        if group is None:
            return positions[self.places]
        shares = [torch.empty_like(positions) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shares, positions.contiguous(), group=group)
        return torch.cat(shares)[self.places]

    def at_positions(self, tokens: Tensor, *, fill: int, group: dist.ProcessGroup | None) -> Tensor:
        """The way back of ``of_tokens``: ``[num_local, ...]`` of ``[num_tokens, ...]``, ``fill`` on padding."""
        size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        whole = tokens.new_full((self.num_local * size, *tokens.shape[1:]), fill)
        whole[self.places] = tokens
        return whole.chunk(size)[rank]


def alignment(*, tensor_parallel_size: int, context_parallel_size: int, sequence_parallel: bool) -> int:
    """What each sequence is padded to a multiple of: ``2 cp`` pieces, each shared out to ``tp`` with ``sp``."""
    pieces = 2 * context_parallel_size if context_parallel_size > 1 else 1
    return pieces * (tensor_parallel_size if sequence_parallel else 1)


def pack(
    tokens: Tensor,
    cu_seqlens: Tensor,
    response_mask: Tensor,
    *,
    multiple: int,
    total: int | None = None,
    rank: int = 0,
    size: int = 1,
) -> PackedMicroBatch:
    """This rank's part of a micro-batch. A batch without sequences becomes one of padding, which nothing reads.

    Args:
        tokens: ``[num_tokens]`` int64.
        cu_seqlens: ``[B+1]`` int64.
        response_mask: ``[num_tokens]`` bool, tokens whose outputs are asked for.
        multiple: see ``alignment``.
        total: tokens over all ranks, padding included; what sequences leave of it becomes a sequence of padding. None:
            as many as sequences need.
        rank: this rank among those that share each sequence.
        size: how many they are.
    """
    device = tokens.device
    lengths = cu_seqlens.diff()
    positions = torch.arange(len(tokens), device=device) - torch.repeat_interleave(cu_seqlens[:-1], lengths)
    padded = (lengths + (-lengths) % multiple).clamp(min=multiple)  # a sequence of no token is padding as well
    if not len(padded):
        padded = torch.full((1,), multiple, dtype=torch.int64, device=device)
        lengths = torch.zeros_like(padded)
    left = 0 if total is None else total - int(padded.sum())
    if left:
        padded, lengths = F.pad(padded, (0, 1), value=left), F.pad(lengths, (0, 1))
    starts = F.pad(padded.cumsum(0), (1, 0))
    total = int(starts[-1])
    at = torch.repeat_interleave(starts[:-1], lengths) + positions  # of each token in the padded stream
    stream = tokens.new_zeros(total).index_copy(0, at, tokens)
    is_padding = torch.ones(total, dtype=torch.bool, device=device)
    is_padding[at] = False
    asked = response_mask & (positions > 0)
    label = tokens.new_zeros(total)
    scored = torch.zeros(total, dtype=torch.bool, device=device)
    label[at[asked] - 1] = tokens[asked]
    scored[at[asked] - 1] = True
    order = zigzag(padded, size)  # the ranks' positions one after the other, as indices into the padded stream
    place = torch.empty_like(order)
    place[order] = torch.arange(total, device=device)
    own = order.chunk(size)[rank]
    return PackedMicroBatch(
        tokens=stream[own][None],
        is_padding=is_padding[own][None],
        position_ids=(own - torch.repeat_interleave(starts[:-1], padded)[own])[None],
        labels=label[own][scored[own]],
        scored=torch.nonzero(scored[own]).squeeze(-1),
        cu_seqlens_padded=starts.to(torch.int32),
        max_length=int(padded.max()),
        predictors=place[(at - 1).clamp(min=0)],
        asked=asked,
        places=place[at],
    )


def zigzag(lengths: Tensor, size: int) -> Tensor:
    """Which tokens each rank holds: ``[sum(lengths)]`` int64, rank 0's first, then rank 1's, and so on.

    Args:
        lengths: ``[B]`` int64, each a multiple of ``2 size`` if ``size`` is above 1.
        size: ranks.

    Raises:
        ValueError: for a length that is not.
    """
    total = int(lengths.sum())
    everything = torch.arange(total, device=lengths.device)
    if size == 1:
        return everything
    if bool((lengths % (2 * size)).any()):
        raise ValueError(f"Zigzag over {size} ranks cuts sequences into {2 * size} pieces, got {lengths.tolist()}.")
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    piece = (everything - starts) // torch.repeat_interleave(lengths // (2 * size), lengths)
    holder = torch.minimum(piece, 2 * size - 1 - piece)
    return torch.argsort(holder, stable=True)


class _GatherForAll(torch.autograd.Function):
    """Every rank gets all ranks' rows and computes the whole loss ``L`` from them.

    ``dL/d(own rows)`` is then the own slice of ``dL/d(all rows)``, which this rank has: no collective. A backward that
    summed over ranks, as that of a differentiable all-gather does, would count ``L`` once for each rank: gradients
    ``size`` times too large, since they are summed over these ranks afterwards.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), dist.get_world_size(group)
        gathered = values.new_empty((ctx.size * len(values), *values.shape[1:]))
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.size)[ctx.rank], None


def gather_for_all(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[n, ...]`` of each rank becomes ``[size * n, ...]`` on all, for a loss that all compute. Collective."""
    gathered: Tensor = _GatherForAll.apply(values, group)  # type: ignore[no-untyped-call]
    return gathered
