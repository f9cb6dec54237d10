"""A Hugging Face model over packed sequences: hidden states, and the head only where it is asked."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging
from typing_extensions import override

from lightning_rlhf.algorithms.log_probs import token_log_probs
from lightning_rlhf.engines.adapter import add_adapter
from lightning_rlhf.engines.packed_attention import PACKED_ATTENTION
from lightning_rlhf.engines.packed_layout import PackedLayout
from lightning_rlhf.engines.shared_stream import SharedStream


def load_causal_lm(
    model: str | Path | nn.Module, *, trained: bool, gradient_checkpointing: bool, lora: object | None = None
) -> PreTrainedModel:
    """The model of one engine, on the CPU or where the given module is, in fp32.

    A module is taken as it is when it trains, and copied when it does not: a frozen reference made from the actor's
    module must not move with it.

    Args:
        model: a Hugging Face directory or id, or a causal language model of transformers.
        trained: whether parameters get gradients: all of a model that is loaded, those of a module that have
            ``requires_grad``.
        gradient_checkpointing: recompute each layer's activations in the backward.
        lora: an adapter, which then alone gets gradients; see ``EngineConfig.lora``.

    Raises:
        TypeError: for a module that is not transformers'.
        ValueError: for a module that another engine has sharded, or that is to train and is frozen.
    """
    if isinstance(model, nn.Module):
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"model must be a directory, an id or a causal language model of transformers, got "
                f"{type(model).__name__}: this engine reads its hidden states and head apart."
            )
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ValueError(
                f"{type(model).__name__} is sharded by another engine already. Give each engine its own model: a path, "
                f"or copy.deepcopy(model) made before training."
            )
        loaded = model if trained else copy.deepcopy(model)
    else:
        with _no_progress_bar():  # one from each rank and engine would run through each other
            loaded = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    return prepare_causal_lm(loaded.float(), trained=trained, gradient_checkpointing=gradient_checkpointing, lora=lora)


def prepare_causal_lm(
    loaded: PreTrainedModel, *, trained: bool, gradient_checkpointing: bool, lora: object | None = None
) -> PreTrainedModel:
    """Makes a model ready for an engine, in place: what trains, its attention, its adapter; see ``load_causal_lm``.

    Raises:
        ValueError: if it is to train and is frozen.
    """
    if lora is not None:
        add_adapter(loaded, lora)
    if not trained:
        loaded.requires_grad_(False)
    elif not any(parameter.requires_grad for parameter in loaded.parameters()):
        raise ValueError(
            f"All parameters of the {type(loaded).__name__} are frozen (requires_grad=False), so there is nothing to "
            f"train. Free those that should, or train an adapter (lora=)."
        )
    loaded.set_attn_implementation(PACKED_ATTENTION)
    if gradient_checkpointing:
        loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return loaded


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that files hold, detached: the bias of a router's choice, say. All ranks have them whole."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        if name not in parameters:
            yield name, tensor


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            hf_logging.enable_progress_bar()


def _equal_but_for_rounding(one: Tensor, other: Tensor, *, atol: float) -> bool:
    """``atol`` is that of fp32; the half precisions round more coarsely."""
    if one.dtype is torch.float32:
        return torch.allclose(one, other, rtol=1e-4, atol=atol)
    return torch.allclose(one, other, rtol=2e-2, atol=2e-2)


class PackedModel(nn.Module, ABC):
    """Scores the tokens of packed sequences; a subclass says with which head.

    One module with one ``forward``, so that sharding hooks at its root see every use of embedding and head.

    Args:
        hf_model: decoder with head, its parameters under Hugging Face names.
    """

    output_names: ClassVar[tuple[str, ...]]
    """The fields of ``ModelOutputs`` that ``forward`` gives, in order."""

    def __init__(self, hf_model: nn.Module) -> None:
        super().__init__()
        self.hf_model = hf_model

    @abstractmethod
    def score(self, states: Tensor, labels: Tensor, *, temperature: float, entropy: bool) -> tuple[Tensor | None, ...]:
        """What the head says of tokens, from the hidden states before them.

        Args:
            states: ``[N, hidden_size]``.
            labels: ``[N]`` int64, the tokens that came next.
            temperature: of the distribution over tokens.
            entropy: also its entropy.

        Returns:
            ``[N]`` fp32 for each of ``output_names``, or None.
        """

    @property
    def hidden_size(self) -> int:
        """Of the hidden states."""
        return int(self._model.config.get_text_config().hidden_size)

    @torch.no_grad()
    def check(self) -> None:
        """Computes what the packed forward takes for granted, on four tokens. Collective once it is sharded.

        Raises:
            ValueError: if packed sequences touch each other (a recurrent or convolutional layer).
        """
        tokens, layout = self._two_equal_sequences()
        was_training = self.training
        self.eval()
        states = self._states(tokens, layout)
        self.train(was_training)
        if not _equal_but_for_rounding(states[:2], states[2:], atol=1e-4):
            raise ValueError(
                f"{type(self.hf_model).__name__} cannot train on packed sequences: of two equal ones the second comes "
                f"out different, so some layer mixes neighbours. Use a model whose tokens meet in attention alone."
            )

    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order: the units of sharding."""
        names: Any = self._model._no_split_modules or ()
        return [module for module in self.hf_model.modules() if type(module).__name__ in names]

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        score_mask: Tensor,
        temperature: float,
        entropy: bool,
        stream: SharedStream | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Scores the tokens that ``score_mask`` marks.

        A language model's head is by far the largest matrix of a small model: rows that nobody reads are not put
        through it.

        Args:
            tokens: ``[num_tokens]`` int64, at least one.
            cu_seqlens: ``[B+1]`` int64.
            score_mask: ``[num_tokens]`` bool, tokens whose scores are read.
            temperature: logits are divided by it.
            entropy: also entropies.
            stream: which tokens to compute, where sequences share a beginning; None computes all.

        Returns:
            ``[num_tokens]`` fp32 for each of ``output_names`` (None for what is not asked), at the token that they
            describe; 0 off the mask and at each sequence's first token, which nothing comes before.
        """
        layout = PackedLayout(cu_seqlens)
        scored = torch.nonzero(score_mask & (layout.position_ids > 0)).squeeze(-1)
        before = scored - 1  # the state at the token before predicts a token
        if stream is None:
            states = self._states(tokens, layout)
        else:
            states, before = self._states(tokens[stream.kept], stream.layout), stream.places[before]
        scores = self.score(states.index_select(0, before), tokens[scored], temperature=temperature, entropy=entropy)

        def at_tokens(values: Tensor) -> Tensor:
            return values.new_zeros(len(tokens)).index_copy(0, scored, values)

        return tuple(None if values is None else at_tokens(values) for values in scores)

    def _states(self, tokens: Tensor, layout: PackedLayout) -> Tensor:
        states: Tensor = self._model.base_model(
            input_ids=tokens[None], position_ids=layout.position_ids[None], use_cache=False, packed_layout=layout
        ).last_hidden_state[0]
        return states

    def _two_equal_sequences(self) -> tuple[Tensor, PackedLayout]:
        device = next(self.parameters()).device
        return torch.tensor([0, 1, 0, 1], device=device), PackedLayout(torch.tensor([0, 2, 4], device=device))

    @property
    def _model(self) -> Any:
        """``hf_model``, of which transformers fixes more than ``nn.Module`` says."""
        return self.hf_model


class PackedCausalLM(PackedModel):
    """Log-probs and entropies of packed sequences.

    Args:
        causal_lm: the model, see ``load_causal_lm``.
        logits_chunk_size: tokens whose logits are held at a time.
    """

    output_names = ("log_probs", "entropy")

    def __init__(self, causal_lm: PreTrainedModel, *, logits_chunk_size: int) -> None:
        super().__init__(causal_lm)
        self.logits_chunk_size = logits_chunk_size

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The model."""
        return self.hf_model

    @override
    @torch.no_grad()
    def check(self) -> None:
        """Also computes what scoring takes for granted of the head.

        Raises:
            ValueError: also if the head does more than one matrix product (a bias, a scale, a soft cap).
        """
        super().check()
        tokens, layout = self._two_equal_sequences()
        was_training = self.training
        self.eval()
        states = self._states(tokens, layout)
        own = self.causal_lm(
            input_ids=tokens[None], position_ids=layout.position_ids[None], use_cache=False, packed_layout=layout
        ).logits[0]
        self.train(was_training)
        if not _equal_but_for_rounding(own, states @ self._head_weight.t(), atol=1e-3):
            raise ValueError(
                f"{type(self.causal_lm).__name__}'s logits are not its last hidden states times the head's weight (is "
                f"there a bias, a scale or a soft cap?). Chunked log-probs compute that product alone; use a model "
                f"with a plain head."
            )

    @override
    def score(self, states: Tensor, labels: Tensor, *, temperature: float, entropy: bool) -> tuple[Tensor | None, ...]:
        """Log-probs of the labels in nats, and the entropies of the distributions that they were drawn from."""
        return token_log_probs(
            states,
            self._head_weight,
            labels,
            temperature=temperature,
            chunk_size=self.logits_chunk_size,
            entropy=entropy,
        )

    @property
    def _head_weight(self) -> Tensor:
        head: Any = self.causal_lm.get_output_embeddings()
        weight: Tensor = head.weight
        return weight
