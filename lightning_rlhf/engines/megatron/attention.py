"""Causal attention of packed sequences in the CPU's layer spec, also where ranks share each sequence.

Megatron's own CPU attention asserts that no ranks share a sequence and builds one mask over all of them. Here every
sequence meets itself alone, so no mask ever spans two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_rlhf.engines.megatron.zigzag import natural_order, packed_lengths
from lightning_rlhf.engines.packed_attention import packed_attention
from lightning_rlhf.engines.packed_layout import PackedLayout


class PackedCoreAttention(nn.Module, ABC):
    """What megatron's layers call between the projections: queries, keys and values in, attended values out.

    Args:
        config: megatron's TransformerConfig.
        layer_number: not needed.
        attn_mask_type: not needed: always causal within a sequence.
        attention_type: must be self-attention.
        attention_dropout: not needed: there is none.
        softmax_scale: of the scores; None: ``head_dim ** -0.5``.
        cp_comm_type: not needed: the subclass says it.
        pg_collection: megatron's process groups.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        if attention_type != "self":
            raise NotImplementedError(f"Packed attention is self-attention, got attention_type={attention_type!r}.")
        self.group = pg_collection.cp
        self.scale: float = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: ``[tokens, heads, head_dim]``, this rank's tokens in zigzag order, rotary embedding applied.
            key: ``[tokens, kv_heads, head_dim]``.
            value: as ``key``.
            attention_mask: must be None: ``packed_seq_params`` says where sequences lie.
            attn_mask_type: not needed.
            attention_bias: must be None.
            packed_seq_params: megatron's PackedSeqParams in the format ``thd``.

        Returns:
            ``[tokens, heads * head_dim]``.
        """
        if packed_seq_params is None or attention_mask is not None or attention_bias is not None:
            raise RuntimeError(
                "Packed attention takes sequences as packed_seq_params (format 'thd') and neither a mask nor a bias. "
                "Call the model through its engine."
            )
        lengths = packed_lengths(packed_seq_params)
        if sum(lengths) != len(query) * self.group.size():
            raise RuntimeError(
                f"The sequences' padded lengths sum to {sum(lengths)}, but {self.group.size()} context-parallel ranks "
                f"hold {len(query)} tokens each."
            )
        if self.group.size() == 1:
            return self.attend_whole(query, key, value, lengths).flatten(1)
        return self.attend(query, key, value, lengths).flatten(1)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Attend where several ranks share each sequence.

        Args:
            query: ``[tokens, heads, head_dim]``.
            key: ``[tokens, kv_heads, head_dim]``.
            value: as ``key``.
            lengths: padded length of each sequence over all ranks.

        Returns:
            As ``query``.
        """

    def attend_whole(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Attend where this rank holds all tokens of its heads, in natural order; shapes as in ``attend``."""
        layout = PackedLayout(torch.tensor([0, *accumulate(lengths)], device=query.device))
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        attended, _ = packed_attention(self, query, key, value, None, packed_layout=layout, scaling=self.scale)
        return attended[0]


class AllGatherAttention(PackedCoreAttention):
    """Every rank gathers all keys and values of its heads, and attends with its own queries.

    One collective a layer and direction; keys and values of whole sequences are held while the layer computes.
    """

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        cp, rank = self.group.size(), self.group.rank()
        keys_and_values = gather_from_sequence_parallel_region(torch.stack([key, value], dim=1), group=self.group)
        order, _ = natural_order(lengths, cp)
        key, value = keys_and_values[order.to(query.device)].unbind(1)
        outputs = []
        for queries, keys, values in zip(
            query.split([length // cp for length in lengths]), key.split(lengths), value.split(lengths), strict=True
        ):
            for index, chunk in zip((rank, 2 * cp - 1 - rank), queries.chunk(2), strict=True):
                end = (index + 1) * len(chunk)
                outputs.append(self._causal_at_end(chunk, keys[:end], values[:end]))
        return torch.cat(outputs)

    def _causal_at_end(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries that are the last of the keys' positions; the mask spans one chunk of one sequence."""
        mask = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(len(key) - len(query))
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=True)
        return attended.transpose(0, 1)


class UlyssesAttention(PackedCoreAttention):
    """Ranks exchange tokens for heads, attend over whole sequences with a share of the heads, and exchange back.

    Where ranks outnumber key-value heads, each of these goes to all the ranks that hold its queries.
    """

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        cp = self.group.size()
        if key.shape[1] < cp:
            key, value = (each.repeat_interleave(cp // each.shape[1], dim=1) for each in (key, value))
        order, back = (places.to(query.device) for places in natural_order(lengths, cp))
        whole = [self._to_heads(each)[order] for each in (query, key, value)]
        attended = self.attend_whole(whole[0], whole[1], whole[2], lengths)
        return self._to_tokens(attended[back])

    def _to_heads(self, states: Tensor) -> Tensor:
        """``[tokens, heads, head_dim]`` to ``[cp * tokens, heads / cp, head_dim]``, rank after rank."""
        from megatron.core.tensor_parallel.mappings import all_to_all

        shares = states.unflatten(1, (self.group.size(), -1)).transpose(0, 1)
        exchanged: Tensor = all_to_all(self.group, shares.flatten(0, 1).contiguous())
        return exchanged

    def _to_tokens(self, states: Tensor) -> Tensor:
        """The way back."""
        from megatron.core.tensor_parallel.mappings import all_to_all

        exchanged: Tensor = all_to_all(self.group, states.contiguous())
        shares = exchanged.view(self.group.size(), -1, *exchanged.shape[1:])
        return shares.transpose(0, 1).flatten(1, 2)
