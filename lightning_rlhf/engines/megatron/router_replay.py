"""Which experts each token goes to, recorded in one pass and replayed in another.

A policy gradient compares two passes over the same tokens. With a mixture of experts the last bits of a router's input
decide which experts a token meets, so that two passes of the same weights may be two different models. Replaying the
choices of one pass in the other takes this away: the old policy's in the update, or the sampling engine's in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_rlhf.engines.megatron.layout import collective_device

FREE = -1
"""Stands for experts that nothing has chosen: of a dense layer, of padding, of a token that was not recorded."""


class ExpertChoices:
    """The routers of one model, which may record what they choose or replay what they are given.

    Build it once, on the unwrapped chunks, before the first forward. Choices of one micro-batch are
    ``[num_local, num_layers, experts_per_token]`` int32, over the positions of this context-parallel rank and the
    layers of the whole model.

    Args:
        chunks: this rank's model chunks.

    Raises:
        ValueError: if the model has no experts.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        config: Any = vars(chunks[0])["config"]
        if config.num_moe_experts is None:
            raise ValueError("Router replay is for a mixture of experts; this model has none.")
        self.num_layers: int = config.num_layers
        self.experts_per_token: int = config.moe_router_topk
        recomputes = config.recompute_granularity == "full"
        self._routers: dict[int, _Router] = {}
        for chunk in chunks:
            any_chunk: Any = chunk
            for layer in any_chunk.decoder.layers:
                router = dict(layer.mlp.named_children()).get("router")
                if router is not None:
                    # megatron asks this object for its choices, by the one method that its own replay has
                    router.router_replay = self._routers[layer.layer_number - 1] = _Router(recomputes=recomputes)

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the choices of every micro-batch whose forward runs inside, in their order.

        Collective over tensor and pipeline parallel ranks when the scope ends.

        Yields:
            A list that holds each micro-batch's choices once the scope has ended.
        """
        found: list[Tensor] = []
        for router in self._routers.values():
            router.recorded = []
        try:
            yield found
            found += self._gather([router.recorded or [] for router in self._routers.values()])
        finally:
            for router in self._routers.values():
                router.recorded = None

    @contextmanager
    def replaying(self, choices: Sequence[Tensor]) -> Iterator[None]:
        """Have routers make these choices, micro-batch after micro-batch, in forward and backward.

        Where a token's choice is ``FREE`` the router chooses. The weights of the chosen experts are always the
        router's own, so that it learns.

        Args:
            choices: one tensor for each micro-batch whose forward runs inside.

        Raises:
            ValueError: if the tensors do not fit the model.
            RuntimeError: if more micro-batches run inside, or one has other positions.
        """
        for one in choices:
            if one.shape[1:] != (self.num_layers, self.experts_per_token):
                raise ValueError(
                    f"Choices must be [num_local, {self.num_layers}, {self.experts_per_token}] (layers, experts per "
                    f"token), got {tuple(one.shape)}."
                )
        for layer, router in self._routers.items():
            router.replay([_share(one[:, layer]) for one in choices])
        try:
            yield
        finally:
            for router in self._routers.values():
                router.replay(None)

    def _gather(self, recorded: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """From what each router here saw to all positions of this context-parallel rank, and all layers."""
        from megatron.core import parallel_state

        tensor_group = parallel_state.get_tensor_model_parallel_group()
        stages = parallel_state.get_pipeline_model_parallel_group()
        count = torch.tensor(max((len(one) for one in recorded), default=0), device=collective_device())
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=stages)  # a stage may hold no layer with experts
        found = []
        for index in range(int(count)):
            mine = self._of_stage([one[index] for one in recorded], stages)
            shares = [torch.empty_like(mine) for _ in range(tensor_group.size())]
            dist.all_gather(shares, mine, group=tensor_group)
            found.append(torch.cat(shares))
        return found

    def _of_stage(self, layers: Sequence[Tensor], stages: Any) -> Tensor:
        device = collective_device()
        num_tokens = torch.tensor(len(layers[0]) if layers else 0, device=device)
        dist.all_reduce(num_tokens, op=dist.ReduceOp.MAX, group=stages)
        sizes = (int(num_tokens), self.num_layers, self.experts_per_token)
        mine = torch.full(sizes, FREE, dtype=torch.int32, device=device)
        for layer, chosen in zip(self._routers, layers, strict=True):
            mine[:, layer] = chosen
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=stages)
        return mine


def _share(choices: Tensor) -> Tensor:
    """The tokens of this tensor-parallel rank, which sees a share of them: experts need sequence parallelism."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    shares: tuple[Tensor, ...] = choices.chunk(size)
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return shares[rank]


class _Router:
    """One router's choices.

    With full recomputation a layer's forward runs twice: first without gradients, then inside the backward with them.
    Both runs of all micro-batches come in the order of the micro-batches, so each has a place of its own in the list.
    """

    def __init__(self, *, recomputes: bool) -> None:
        self.recorded: list[Tensor] | None = None
        self._recomputes = recomputes
        self._given: list[Tensor] | None = None
        self._next = {False: 0, True: 0}

    def replay(self, given: list[Tensor] | None) -> None:
        """Make these choices from now on, or, for None, own ones."""
        self._given = given
        self._next = {False: 0, True: 0}

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What megatron calls in place of a top-k (router_replay.py of megatron-core).

        Args:
            scores: ``[tokens, num_experts]``.
            topk: experts of a token.
            num_groups: groups of experts, if choice is limited to some of them.
            group_topk: how many of them.
            default_compute_topk: the router's own choice.

        Returns:
            Scores and numbers of the chosen experts, ``[tokens, topk]`` each.
        """
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        again = self._recomputes and torch.is_grad_enabled()
        if self._given is not None:
            chosen = self._replayed(chosen, again=again)
            values = scores.gather(1, chosen)
        if self.recorded is not None and not again:
            self.recorded.append(chosen.to(torch.int32))
        return values, chosen

    def _replayed(self, own: Tensor, *, again: bool) -> Tensor:
        assert self._given is not None
        index = self._next[again]
        if index >= len(self._given):
            raise RuntimeError(f"A micro-batch runs for which no choices were given: there are {len(self._given)}.")
        given = self._given[index].to(own)
        if given.shape != own.shape:
            raise RuntimeError(
                f"Micro-batch {index} was given choices of {len(given)} tokens, but the router sees {len(own)}."
            )
        self._next[again] = index + 1
        return torch.where((given == FREE).any(dim=1, keepdim=True), own, given)
