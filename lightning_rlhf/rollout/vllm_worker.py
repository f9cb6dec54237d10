"""What vLLM mixes into its workers; importing this makes our weight-transfer back end known in the worker's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_rlhf.rollout.vllm_transfer import names_of, register
from lightning_rlhf.rollout.vllm_weights import read_own


class WorkerExtension:
    """Methods that ``collective_rpc`` finds on every worker."""

    model_runner: Any

    def read_weights_for_receipt(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of what this worker holds whole under these names; see `read_own`."""
        return read_own(self.model_runner.model, names, names_of(self.model_runner.model_config.model))


register()
