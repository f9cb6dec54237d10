"""The padding token's row of the embedding, which transformers does not train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def freeze_padding_row(chunk: Any, pad_token_id: int | None) -> None:
    """Keeps the gradient of tokens that are the padding token out of the embedding, as ``nn.Embedding(padding_idx)``.

    Models of transformers embed with ``padding_idx=config.pad_token_id``. Where that token also ends texts, sequences
    are full of it, and its row would move here alone. The gradient that a tied head gives the row stays.

    Args:
        chunk: the first model chunk.
        pad_token_id: of the model's configuration; None: there is none.
    """
    if pad_token_id is None:
        return
    embedding = chunk.embedding.word_embeddings

    def detach(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        is_padding = inputs[0] == pad_token_id  # [1, tokens]
        if embedding.reduce_scatter_embeddings:  # [tokens / tp, 1, hidden]: this rank's share
            group = embedding.tp_group
            is_padding = is_padding.t().chunk(group.size())[group.rank()]
        return torch.where(is_padding[..., None], output.detach(), output)

    embedding.register_forward_hook(detach)
