"""The head of a value model: one number per token in place of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """A linear map to one number, in fp32, zero at first, in the place of megatron's ``output_layer``.

    It is the same on all tensor-parallel ranks. Under sequence parallelism each of them sees a share of the tokens, so
    its weight carries megatron's mark that its gradient is to be summed over them.

    Args:
        config: megatron's TransformerConfig.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = bool(config.sequence_parallel)
        self.weight = nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=torch.float32, device=torch.cuda.current_device())
        )
        setattr(self.weight, "sequence_parallel", self.sequence_parallel)  # noqa: B010

    def forward(
        self, states: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Values of hidden states, as megatron calls its output layer.

        Args:
            states: ``[tokens, 1, hidden_size]``; under sequence parallelism this rank's share of them.
            weight: of a tied head; a value head is never tied.
            runtime_gather_output: has no meaning here.

        Returns:
            ``[tokens, 1, 1]`` fp32 of all tokens, and no bias.
        """
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        values = nn.functional.linear(states.float(), self.weight)
        if self.sequence_parallel:
            # every tensor-parallel rank computes the same loss of all values: its own slice of the gradient is whole
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
