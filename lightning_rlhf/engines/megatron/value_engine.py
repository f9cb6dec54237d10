"""The engine contract of a value model over megatron-core."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_rlhf.engines.megatron import heads
from lightning_rlhf.engines.megatron.engine import MegatronEngine
from lightning_rlhf.engines.megatron.packed import PackedMicroBatch
from lightning_rlhf.types import ModelOutputs


class MegatronValueEngine(MegatronEngine):
    """A value model with megatron-core: a head of one number on the last stage, zero at first."""

    value_head = True

    @override
    def _output_names(self, entropy: bool) -> tuple[str, ...]:
        return ("values",)

    @override
    def _score(
        self, packed: PackedMicroBatch, chunk: Any, output: Tensor, temperature: float, *, entropy: bool
    ) -> ModelOutputs:
        return heads.values_of(output, packed, context_group=self._context_group())
