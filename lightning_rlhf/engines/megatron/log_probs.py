"""Log-probs and entropies from hidden states and a head whose rows are dealt to ranks; logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    chunk_size: int = 512,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of one label per row under ``softmax(hidden @ W.T / temperature)``, ``W`` being the first rows of all.

    Rank ``r`` of the group holds rows ``r * V_local`` to ``(r + 1) * V_local`` of the head. Rows from ``vocab_size`` on
    are padding: they take no part in the softmax, so no probability is theirs and their gradient is exactly 0.

    A chunk costs two all-reduces of a few numbers per token: the maximum over the vocabulary, then three sums. With
    ``z`` the scaled logits, ``m`` their maximum, ``c = z - m`` and ``S = sum exp(c)``: ``log p_y = c_y - log S`` and
    ``H = log S - (sum exp(c) c) / S``. The backward needs no collective: ``d log p_y / dz = onehot(y) - p`` and
    ``dH / dz = -p (log p + H)``, on this rank's rows from the saved ``m + log S`` and ``H``. Logits are computed anew
    for it; nothing is changed in place that a caller can see.

    Args:
        hidden: ``[T, H]``, the same on all ranks of the group.
        weight: ``[V_local, H]``, this rank's rows, in the dtype of ``hidden``.
        labels: ``[T]`` int64 in ``[0, vocab_size)``, the same on all ranks.
        vocab_size: rows of the head that are tokens, over all ranks.
        group: the ranks that share the head; None for one rank.
        temperature: logits are divided by it.
        chunk_size: rows whose logits are held at a time.
        entropy: also the entropy of each row's distribution.

    Returns:
        Log-probs ``[T]`` in nats, and entropies ``[T]`` or None, fp32, equal on all ranks. In the backward the gradient
        of ``hidden`` is that of this rank's rows alone: the caller sums it over the group (as the mappings of
        tensor parallelism do).

    Raises:
        ValueError: if shapes do not fit, or ``temperature`` or ``chunk_size`` is not positive.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"Expected hidden [T, H], weight [V_local, H] and labels [T], got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(labels.shape)}."
        )
    if not temperature > 0 or chunk_size < 1:
        raise ValueError(f"temperature and chunk_size must be positive, got {temperature} and {chunk_size}.")
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if not 0 < vocab_size <= size * len(weight):
        raise ValueError(f"vocab_size={vocab_size} does not fit {size} rank(s) with {len(weight)} rows each.")
    first = rank * len(weight)
    num_rows = min(max(vocab_size - first, 0), len(weight))
    scored: tuple[Tensor, Tensor | None] = _VocabParallel.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, _Rows(first, num_rows), group if size > 1 else None, temperature, chunk_size, entropy
    )
    return scored


class _Rows:
    """Which rows of the head this rank holds: ``num`` from ``first`` on, without padding."""

    def __init__(self, first: int, num: int) -> None:
        self.first, self.num = first, num

    def place(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's row here (0 for one that is elsewhere), and whether it is here."""
        local = labels - self.first
        here = (local >= 0) & (local < self.num)
        return torch.where(here, local, 0), here


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float()  # a new tensor: dividing it in place changes neither input
    return logits if temperature == 1.0 else logits.div_(temperature)


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: _Rows,
        group: dist.ProcessGroup | None,
        temperature: float,
        chunk_size: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        tokens = weight[: rows.num]
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(log_probs)
        entropies = torch.empty_like(log_probs) if entropy else None
        for start in range(0, len(hidden), chunk_size):
            part = slice(start, start + chunk_size)
            logits = _scaled_logits(hidden[part], tokens, temperature)
            maximum = logits.new_full((len(logits),), -torch.inf) if rows.num == 0 else logits.amax(-1)
            if group is not None:
                dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            centred = logits.sub_(maximum[:, None])
            place, here = rows.place(labels[part])
            chosen = torch.zeros_like(maximum)
            if rows.num:
                chosen = centred.gather(-1, place[:, None]).squeeze(-1) * here
            powers = centred.exp()
            sums = torch.stack([powers.sum(-1), chosen, *([powers.mul_(centred).sum(-1)] if entropy else [])])
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            log_probs[part] = sums[1] - log_sum
            log_sums[part] = maximum + log_sum
            if entropies is not None:
                entropies[part] = log_sum - sums[2] / sums[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, labels, log_sums, entropies)
        ctx.rows, ctx.temperature, ctx.chunk_size = rows, temperature, chunk_size
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sums, entropies = ctx.saved_tensors
        grad_log_probs, grad_entropies = grad_outputs
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sums)
        tokens = weight[: ctx.rows.num]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            log_p = _scaled_logits(hidden[part], tokens, ctx.temperature).sub_(log_sums[part, None])
            outer = grad_log_probs[part, None]
            if grad_entropies is None:
                grad_logits = log_p.exp_().mul_(-outer)
            else:
                grad_logits = log_p.exp()
                grad_logits.mul_(log_p.add_(entropies[part, None]).mul_(-grad_entropies[part, None]).sub_(outer))
            if ctx.rows.num:
                place, here = ctx.rows.place(labels[part])
                grad_logits.scatter_add_(-1, place[:, None], outer * here[:, None])
            if ctx.temperature != 1.0:
                grad_logits.div_(ctx.temperature)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, tokens, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight[: ctx.rows.num] += grad_logits.t() @ hidden[part]
        return (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 6)
