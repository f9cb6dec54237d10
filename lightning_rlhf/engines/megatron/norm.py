"""The RMS norm of the CPU's layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32 with a weight in the parameters' dtype, as transformers computes it.

    Megatron's own CPU norm refuses sequence parallelism (torch_norm.py:32), which needs one thing of a norm: a mark on
    the weight, by which its gradient is summed over the tensor-parallel ranks that each saw a share of the tokens.

    Args:
        config: megatron's TransformerConfig.
        hidden_size: width of what is normalised.
        eps: added to the mean square.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (a mark that megatron reads)

    def forward(self, states: Tensor) -> Tensor:
        """``[..., hidden_size]`` normalised over the last dim."""
        normed = F.rms_norm(states.float(), states.shape[-1:], eps=self.eps)
        return normed.to(states.dtype) * self.weight
