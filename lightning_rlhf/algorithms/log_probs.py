"""Log-probs of given tokens, and entropies, from hidden states: never the logits of all tokens at once."""

from __future__ import annotations

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

    Logits exist for ``chunk_size`` rows at a time, in the forward and again in the backward, whose gradients are in
    closed form: with ``z`` the scaled logits, ``p`` their softmax and ``H`` the entropy,
    ``d log p_y / dz = onehot(y) - p`` and ``dH / dz = -p (log p + H)``. The product with the head is in the inputs'
    dtype (in the autocast dtype where autocast is on), everything after it in fp32, or in fp64 for fp64 inputs; the
    gradient of the head is summed over chunks in the same precision.

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


def _scaled_logits(hidden: Tensor, head_weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    # the product is a new tensor, so dividing it in place changes neither input
    logits = (hidden @ head_weight.t()).to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)


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
        log_sums = torch.empty_like(log_probs)
        entropies = torch.empty_like(log_probs) if entropy else None
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _scaled_logits(hidden[rows], head_weight, temperature, dtype)
            log_sum = torch.logsumexp(logits, dim=-1)
            chosen = logits.gather(-1, labels[rows, None]).squeeze(-1)
            log_probs[rows] = chosen - log_sum
            log_sums[rows] = log_sum
            if entropies is not None:
                log_p = logits.sub_(log_sum[:, None])
                entropies[rows] = log_p.exp().mul_(log_p).sum(-1).neg_()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, head_weight, labels, log_sums, entropies)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, head_weight, labels, log_sums, entropies = ctx.saved_tensors
        grad_log_probs, grad_entropies = grad_outputs
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sums)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head_weight, dtype=log_sums.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            log_p = _scaled_logits(hidden[rows], head_weight, ctx.temperature, log_sums.dtype).sub_(
                log_sums[rows, None]
            )
            outer = grad_log_probs[rows, None]
            if grad_entropies is None:
                grad_logits = log_p.exp_().mul_(-outer)
            else:
                grad_logits = log_p.exp()
                grad_logits.mul_(log_p.add_(entropies[rows, None]).mul_(-grad_entropies[rows, None]).sub_(outer))
            grad_logits.scatter_add_(-1, labels[rows, None], outer)
            if ctx.temperature != 1.0:
                grad_logits.div_(ctx.temperature)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, head_weight, out=grad_hidden[rows])
            if grad_head is not None:
                _accumulate_product(grad_head, grad_logits, hidden[rows])
        return grad_hidden, None if grad_head is None else grad_head.to(head_weight.dtype), None, None, None, None


def _accumulate_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    if total.dtype is hidden.dtype:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total.add_(grad_logits.t() @ hidden)
