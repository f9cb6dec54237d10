"""Log-probs of given tokens, and entropies, from hidden states: never the logits of all tokens at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def token_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 512,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of one label per row under ``softmax(hidden @ head_weight.T / temperature)``.

    Logits exist for ``chunk_size`` rows at a time, in the forward and again in the backward, which takes over those of
    the last rows. Gradients are in closed form: with ``z`` the scaled logits, ``p`` their softmax and ``H`` the
    entropy, ``d log p_y / dz = onehot(y) - p`` and ``dH / dz = -p (log p + H)``. The product with the head is in the
    inputs' dtype (in the autocast dtype where autocast is on), everything after it in fp32, or in fp64 for fp64 inputs;
    the gradient of the head is summed over chunks in the same precision.

    Args:
        hidden: ``[T, H]``, the states that predict the labels; not changed.
        head_weight: ``[V, H]`` in the dtype of ``hidden``; not changed.
        labels: ``[T]`` int64 in ``[0, V)``.
        temperature: logits are divided by it.
        chunk_size: rows whose logits are held at a time.
        entropy: also the entropy of each row's distribution.

    Returns:
        Log-probs ``[T]`` in nats, and entropies ``[T]`` or None: fp32 (fp64 for fp64 inputs), both differentiable.

    Raises:
        ValueError: if shapes or dtypes do not fit, or ``temperature`` or ``chunk_size`` is not positive.
        RuntimeError: in a backward with ``create_graph``.
    """
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ValueError(
            f"Expected hidden [T, H] and head_weight [V, H], got {tuple(hidden.shape)} and {tuple(head_weight.shape)}."
        )
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"Expected one label per row, [{hidden.shape[0]}], got {tuple(labels.shape)}.")
    if not temperature > 0:
        raise ValueError(
            f"temperature must be positive, got {temperature}: greedy decoding has no log-probs to train on."
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):  # a custom Function's own products would be cast in the forward alone
        dtype = torch.get_autocast_dtype(device_type)
        hidden, head_weight = hidden.to(dtype), head_weight.to(dtype)
    if hidden.dtype != head_weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and head_weight {head_weight.dtype}: cast one of them to the other."
        )
    with torch.autocast(device_type, enabled=False):
        scored: tuple[Tensor, Tensor | None] = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, head_weight, labels, temperature, chunk_size, entropy
        )
    return scored


BLOCK_ELEMENTS = 1 << 19
"""Logits in a block on a CPU, 2 MiB in fp32: what its kernels pass to each other stays in the cache."""


def _log_p_by_block(logits: Tensor, temperature: float, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yields rows of a chunk with their log-softmax, a new tensor in ``dtype``."""
    size = len(logits) if logits.is_cuda else max(1, BLOCK_ELEMENTS // logits.shape[1])
    for start in range(0, len(logits), size):
        block = slice(start, start + size)
        scaled = logits[block].to(dtype)
        yield block, torch.log_softmax(scaled if temperature == 1.0 else scaled / temperature, dim=-1)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        log_probs = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        entropies = torch.empty_like(log_probs) if entropy else None
        logits = None
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            logits = hidden[rows] @ head_weight.t()
            for block, log_p in _log_p_by_block(logits, temperature, dtype):
                log_probs[rows][block] = log_p.gather(-1, labels[rows][block, None]).squeeze(-1)
                if entropies is not None:
                    entropies[rows][block] = log_p.exp().mul_(log_p).sum(-1).neg_()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, head_weight, labels, entropies)
        ctx.temperature, ctx.chunk_size, ctx.dtype = temperature, chunk_size, dtype
        # The head's backward comes first: nothing else is held yet when it takes the last chunk over from the forward.
        ctx.last_logits = logits if any(ctx.needs_input_grad[:2]) else None
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "token_log_probs gives gradients, but not gradients of gradients: call backward without create_graph."
            )
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):  # as in the forward
            return (*_TokenLogProbs._gradients(ctx, *grad_outputs), None, None, None, None)

    @staticmethod
    def _gradients(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        hidden, head_weight, labels, entropies = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(len(hidden), dtype=ctx.dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head_weight, dtype=ctx.dtype) if ctx.needs_input_grad[1] else None
        last_logits, ctx.last_logits = ctx.last_logits, None  # a second backward computes them again
        for start in reversed(range(0, hidden.shape[0], ctx.chunk_size)):
            rows = slice(start, start + ctx.chunk_size)
            # and then, block after block, their gradient
            logits = hidden[rows] @ head_weight.t() if last_logits is None else last_logits
            last_logits = None
            for block, log_p in _log_p_by_block(logits, ctx.temperature, ctx.dtype):
                outer = grad_log_probs[rows][block, None]
                if grad_entropies is None:
                    grad = log_p.exp_().mul_(-outer)
                else:
                    slope = log_p.exp()
                    past = log_p.add_(entropies[rows][block, None]).mul_(-grad_entropies[rows][block, None])
                    grad = slope.mul_(past.sub_(outer))
                grad.scatter_add_(-1, labels[rows][block, None], outer)
                logits[block] = grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature)
            if grad_hidden is not None:
                torch.mm(logits, head_weight, out=grad_hidden[rows])
            if grad_head is not None:
                _accumulate_product(grad_head, logits, hidden[rows])
        return grad_hidden, None if grad_head is None else grad_head.to(head_weight.dtype)


def _accumulate_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    if total.dtype is hidden.dtype:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total.add_(grad_logits.t() @ hidden)
