"""Where a receiver puts tensors: memory of its consumer's, or memory that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class ReceiverMemory:
    """Destinations, and one piece of memory that is kept: to take a fresh one for each sync costs more than a copy.

    Args:
        before_reuse: called before the kept memory is written again.
    """

    def __init__(self, *, before_reuse: Callable[[], None]) -> None:
        self._before_reuse = before_reuse
        self._kept = torch.empty(0, dtype=torch.uint8)
        self.destinations: Mapping[str, Tensor] = {}

    def destination(self, name: str, *, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
        """The destination of this name, if it is contiguous and of this dtype and shape: others are left alone."""
        found = self.destinations.get(name)
        if found is None or found.dtype != dtype or found.shape != shape:
            return None
        return found if found.is_contiguous() else None

    def kept(self, num_bytes: int, *, device: torch.device) -> Tensor:
        """The kept memory, ``uint8 [num_bytes]``."""
        self._before_reuse()
        if self._kept.numel() < num_bytes or self._kept.device != device:
            self._kept = torch.empty(0, dtype=torch.uint8)  # let go of the smaller one first
            self._kept = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._kept[:num_bytes]
