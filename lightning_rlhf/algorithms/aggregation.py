"""Turns the way in which a loss is averaged into one weight per token.

With the weights of a mini-batch fixed beforehand from its global counts, the loss is ``(terms * weights).sum()``
for any split of the mini-batch over micro-batches and ranks.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from torch import Tensor

from lightning_rlhf.algorithms.sequences import sequence_sums, spread

AggregationMode: TypeAlias = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


def loss_weights(
    response_mask: Tensor,
    mode: AggregationMode,
    *,
    cu_seqlens: Tensor | None = None,
    num_global_tokens: int | None = None,
    num_global_sequences: int | None = None,
    norm_length: int | None = None,
) -> Tensor:
    r"""One weight per token, so that ``(terms * weights).sum()`` is the aggregated loss.

    With :math:`N` tokens and :math:`S` sequences that train in the mini-batch over all data-parallel ranks,
    :math:`n_s` tokens in the sequence and the constant :math:`L`, a token weighs

    * ``token-mean``: :math:`1/N` (DAPO, arXiv:2503.14476);
    * ``seq-mean-token-mean``: :math:`1/(S n_s)` (GRPO, arXiv:2402.03300);
    * ``seq-mean-token-sum``: :math:`1/S`;
    * ``seq-mean-token-sum-norm``: :math:`1/(S L)` (Dr.GRPO, arXiv:2503.20783).

    A sequence without a token on the mask trains nothing and is not counted in :math:`S`. A mini-batch without any
    such token weighs 0 everywhere: its loss is exactly 0.

    Args:
        response_mask: tokens that train, padded ``[B, T]`` or flat ``[num_tokens]``; whole sequences, never a part.
        mode: how to average.
        cu_seqlens: ``[B+1]`` for the flat layout; ``token-mean`` does without.
        num_global_tokens: :math:`N`. None says that ``response_mask`` is the whole mini-batch of all ranks; a part
            (a rank's share, a micro-batch) must bring the count, else it averages over itself.
        num_global_sequences: :math:`S`; None as for ``num_global_tokens``.
        norm_length: :math:`L`, a constant of the run such as the longest response allowed; needed by
            ``seq-mean-token-sum-norm`` alone.

    Returns:
        fp32, in the shape of ``response_mask``, exactly 0 off the mask.

    Raises:
        ValueError: for an unknown mode, a missing ``norm_length``, a flat mask without ``cu_seqlens`` in a ``seq-*``
            mode, or a global count below what this mask alone holds.
    """
    if mode not in get_args(AggregationMode):
        raise ValueError(f"Unknown aggregation {mode!r}; expected one of {', '.join(get_args(AggregationMode))}.")
    mask = response_mask.bool()
    weights = mask.double()
    if mode == "token-mean":
        count = _global_count("num_global_tokens", num_global_tokens, int(mask.sum()))
        return (weights / max(count, 1)).float()
    lengths = sequence_sums(weights, mask, cu_seqlens)
    count = _global_count("num_global_sequences", num_global_sequences, int((lengths > 0).sum()))
    if mode == "seq-mean-token-mean":
        weights = weights / spread(lengths.clamp(min=1), weights, cu_seqlens)
    elif mode == "seq-mean-token-sum-norm":
        if norm_length is None or norm_length < 1:
            raise ValueError(
                f"seq-mean-token-sum-norm divides by a constant of the run: norm_length must be at least 1, "
                f"got {norm_length}. Give the longest response allowed; the width of a padded batch would make the "
                "loss depend on padding."
            )
        weights = weights / norm_length
    return (weights / max(count, 1)).float()


def _global_count(name: str, given: int | None, local: int) -> int:
    """The given count, or this mask's own; a count below the mask's own cannot be global."""
    if given is None:
        return local
    if given < local:
        raise ValueError(
            f"{name}={given}, but this mask alone holds {local}. Give the count of the whole mini-batch over all "
            "data-parallel ranks."
        )
    return int(given)
