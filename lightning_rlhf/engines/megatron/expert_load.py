"""How evenly tokens are shared out among experts, counted at the routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_rlhf.engines.megatron.layout import collective_device
from lightning_rlhf.metrics import Metric

LOAD_METRICS = frozenset({"expert_load_max", "idle_experts"})


class ExpertLoad:
    """Counts the tokens that each expert of each layer gets in training forwards; padding is left out.

    Args:
        chunks: this rank's unwrapped model chunks.

    Raises:
        ValueError: if the model has no experts.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        config: Any = vars(chunks[0])["config"]
        if config.num_moe_experts is None:
            raise ValueError("Expert load is of a mixture of experts; this model has none.")
        self._counts = torch.zeros(config.num_layers, config.num_moe_experts, device=collective_device())
        for chunk in chunks:
            any_chunk: Any = chunk
            for layer in any_chunk.decoder.layers:
                router = dict(layer.mlp.named_children()).get("router")
                if router is not None:
                    self._count(router, layer.layer_number - 1)

    def _count(self, router: nn.Module, layer: int) -> None:
        def hook(module: nn.Module, inputs: tuple[Tensor, Tensor | None], outputs: tuple[Tensor, Tensor]) -> None:
            # a forward that is trained runs with gradients once, under recomputation the second time
            if module.training and torch.is_grad_enabled():
                chosen, is_padding = outputs[1].detach(), inputs[1]
                if is_padding is not None:
                    chosen = chosen & ~is_padding.reshape(-1, 1)
                self._counts[layer] += chosen.sum(0)

        router.register_forward_hook(hook)

    def read(self) -> Tensor:
        """Counts over all ranks since the last call, which then start at zero again. Collective over the world.

        Returns:
            ``[num_layers, num_experts]`` fp32; rows of dense layers are zero.
        """
        # each token of each layer is seen by one rank: layers are cut by stage, tokens by the other axes
        total = self._counts.clone()
        dist.all_reduce(total)
        self._counts.zero_()
        return total

    def metrics(self) -> dict[str, Metric]:
        """``imbalance`` of the counts since the last call, the same on all ranks. Collective over the world."""
        busiest, idle = imbalance(self.read())
        found = {"expert_load_max": busiest, "idle_experts": idle}
        return {name: Metric.of(torch.tensor(value)) for name, value in found.items()}


def imbalance(counts: Tensor) -> tuple[float, float]:
    """Two numbers for a logger.

    Args:
        counts: of ``ExpertLoad.read``.

    Returns:
        The busiest expert's tokens over an even share (1 is even), averaged over the layers with experts; and the
        share of experts that got no token at all. Zero for both where nothing was counted.
    """
    layers = counts[counts.sum(1) > 0]
    if not len(layers):
        return 0.0, 0.0
    busiest = (layers.max(1).values / layers.mean(1)).mean()
    return float(busiest), float((layers == 0).float().mean())
