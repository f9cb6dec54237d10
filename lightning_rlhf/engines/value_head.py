"""A value model: the decoder of a causal language model with one number per token in place of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rlhf.engines.fsdp2 import FSDP2Engine
from lightning_rlhf.engines.hf_engine import HFEngine
from lightning_rlhf.engines.hf_model import PackedModel
from lightning_rlhf.engines.torch import TorchEngine


class ValueModel(nn.Module):
    """The decoder of a causal language model under its own name, and a linear head ``score`` without bias.

    Parameters are named as in transformers' ``...ForSequenceClassification`` with one label. The head starts at zero:
    every value is 0 at first, on every rank and for every seed, and no advantage is bent by a head drawn at random.

    Args:
        causal_lm: gives up its decoder; its own head is dropped.

    Raises:
        ValueError: if the model does not keep decoder and head apart.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        base: Any = causal_lm.base_model
        if base is causal_lm:
            raise ValueError(
                f"{type(causal_lm).__name__} has no decoder apart from its head, so there is none to put a value head "
                f"on. Use a causal language model of transformers (...ForCausalLM)."
            )
        self.config: Any = causal_lm.config
        self._no_split_modules: Any = causal_lm._no_split_modules
        self._prefix = str(causal_lm.base_model_prefix)
        self.add_module(self._prefix, base)
        # made without a draw from the global generator, which belongs to the run
        self.score = nn.utils.skip_init(nn.Linear, self.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.score.weight)
        if base.device.type != "meta":  # else it stays here, with its zeros, while the decoder waits for its weights
            self.score.to(device=base.device, dtype=torch.float32)
        self.score.requires_grad_(any(parameter.requires_grad for parameter in base.parameters()))

    @property
    def base_model(self) -> nn.Module:
        """The decoder."""
        return self.get_submodule(self._prefix)


class PackedValueModel(PackedModel):
    """Values of packed sequences: that of a token is read at the hidden state before it, from which it is drawn.

    Args:
        model: decoder and value head.
    """

    output_names = ("values",)

    def __init__(self, model: ValueModel) -> None:
        super().__init__(model)

    @override
    def score(self, states: Tensor, labels: Tensor, *, temperature: float, entropy: bool) -> tuple[Tensor | None, ...]:
        """The value of each state; neither the label nor the temperature matters."""
        head: nn.Linear = self._model.score
        # a return needs more digits than bf16 has, and the product costs nothing
        with torch.autocast(states.device.type, enabled=False):
            return (F.linear(states.float(), head.weight.float()).squeeze(-1),)


class _ValueEngine(HFEngine):
    """What an engine of a value model has in place of a language model's."""

    @override
    def wrap(self, causal_lm: PreTrainedModel) -> PackedModel:
        return PackedValueModel(ValueModel(causal_lm))


class TorchValueEngine(_ValueEngine, TorchEngine):
    """A value model in one process, or replicated; see ``TorchEngine``."""


class FSDP2ValueEngine(_ValueEngine, FSDP2Engine):
    """A value model sharded with FSDP2; see ``FSDP2Engine``."""
