"""Megatron's router, whose losses and counts are of real tokens: padding weighs nothing, whatever rank it lies on."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor


@cache
def real_token_router() -> type[Any]:
    """``TopKRouter`` where micro-batches are padded, and shared out among ranks by tokens.

    How much padding a micro-batch has, and on which of the tensor- and context-parallel ranks it lies, depends on the
    layout; so nothing may be counted by a rank's positions. ``padding_mask`` is True on padding.
    """
    from megatron.core.transformer.moe.moe_utils import (
        get_tokens_per_expert_and_token_count,
        switch_load_balancing_loss_func,
    )
    from megatron.core.transformer.moe.router import TopKRouter

    class RealTokenRouter(TopKRouter):  # type: ignore[misc]
        def _apply_aux_loss(
            self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
        ) -> Tensor:
            """Attaches the balancing loss of the micro-batch, ``E sum_i f_i P_i`` over its real tokens.

            Since gradients are divided by the mini-batch's tokens, the loss is multiplied by the micro-batch's.
            Megatron multiplies by those of this rank (router.py:466), which is too little where ranks share a
            micro-batch, and differently so where padding lies on some of them alone. A micro-batch of padding alone
            adds nothing.
            """
            coefficient = self.get_aux_loss_coeff("aux_loss")
            if coefficient == 0:
                return probs
            load, _, num_tokens = get_tokens_per_expert_and_token_count(
                routing_map=routing_map, reduce_group=self.tp_cp_group, topk=self.topk, with_padding_mask=True
            )
            num_tokens = num_tokens.clamp(min=1)
            loss = switch_load_balancing_loss_func(
                probs=scores_for_aux_loss,
                tokens_per_expert=load,
                total_num_tokens=num_tokens,
                topk=self.topk,
                num_experts=self.config.num_moe_experts,
                moe_aux_loss_coeff=coefficient,
                fused=self.config.moe_router_fusion,
            )
            attached: Tensor = self.attach_and_log_load_balancing_loss(
                probs, coefficient, loss, "load_balancing_loss", self.tp_cp_group, valid_token_count=num_tokens
            )
            return attached

        def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
            """Counts the tokens that biases follow; the mask as a column, as router.py:542 should take it."""
            super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask[:, None])

    return RealTokenRouter
