"""What an engine needs to know about a model before it has weights: tokenizer, ends, names of its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.rollout.stored_form import StoredForm


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """The Hugging Face names that a push must bring, and those that repeat one of them.

    Attributes:
        shapes: by required name, the tensor's shape.
        aliases: by name of a tied tensor, the required name whose tensor it is (``lm_head.weight`` of a tied model).
        stored: the same tensors as files hold them, by name, where that differs: transformers keeps all experts of a
            layer in one tensor, in a file each has its own. A push brings either form.
        stored_form: the way from the one to the other; None where they are the same.
    """

    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    stored: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stored_form: StoredForm | None = field(default=None, compare=False, repr=False)

    def in_files(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes a push through, in the form of files, which is the one that vLLM reads."""
        yield from named_tensors if self.stored_form is None else self.stored_form.convert(named_tensors)

    def check(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes a push through, each tensor once, aliases left out, and looks at names and shapes on the way.

        Raises:
            ValueError: naming the tensor, if it is unknown, repeated or of another shape; after the last one, naming
                those that are missing.
        """
        known, sent = self.shapes | self.stored, set()
        for name, tensor in named_tensors:
            if name in self.aliases:
                continue
            if name not in known:
                raise ValueError(
                    f"Weight push: the model has no tensor {name!r} (it has {sorted(self.shapes)[:4]}, ...). Send "
                    f"Hugging Face names, without wrapper prefixes."
                )
            if name in sent:
                raise ValueError(f"Weight push: {name!r} was sent twice.")
            if tuple(tensor.shape) != known[name]:
                raise ValueError(
                    f"Weight push: {name!r} has shape {tuple(tensor.shape)}, expected {known[name]}: send the "
                    f"full tensor, gathered over all shards."
                )
            sent.add(name)
            yield name, tensor
        missing = min((set(form) - sent for form in (self.shapes, self.stored) if form), key=len, default=set())
        if missing:
            raise ValueError(
                f"Weight push: {len(missing)} of {len(self.shapes)} tensors are missing: {sorted(missing)[:8]}. "
                f"A push brings all of them; the head of an untied model, too."
            )


@dataclass(frozen=True, kw_only=True)
class ModelDirectory:
    """Config and tokenizer of a Hugging Face model; no weights are read.

    Attributes:
        path: directory, or a name that the Hugging Face cache knows.
        config: the Hugging Face config.
        tokenizer: the tokenizer.
        vocab_size: ids that the tokenizer has.
        end_token_ids: ids that end a response: the tokenizer's EOS and those of ``generation_config.json``.
    """

    path: str
    config: Any
    tokenizer: Any
    vocab_size: int
    end_token_ids: frozenset[int]

    @classmethod
    def read(cls, model: str | Path) -> ModelDirectory:
        """Reads config and tokenizer.

        Raises:
            ValueError: if neither the tokenizer nor the configs name an id that ends a response.
        """
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(str(model))
        tokenizer = AutoTokenizer.from_pretrained(str(model))
        ends = _as_ids(tokenizer.eos_token_id)
        generation_config = Path(model) / "generation_config.json"
        if generation_config.is_file():
            ends |= _as_ids(json.loads(generation_config.read_text(encoding="utf-8")).get("eos_token_id"))
        else:
            ends |= _as_ids(config.eos_token_id)
        if not ends:
            raise ValueError(f"{model}: no EOS id in tokenizer, config or generation_config.json; set the tokenizer's.")
        return cls(
            path=str(model),
            config=config,
            tokenizer=tokenizer,
            vocab_size=len(tokenizer),
            end_token_ids=frozenset(ends),
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def weight_names(self) -> WeightNames:
        """Names and shapes, from the model built without memory."""
        return _weight_names_of_config(self.config)


def weight_names_at(model: str | Path) -> WeightNames:
    """Names and shapes of a model's tensors, from its config alone."""
    from transformers import AutoConfig

    return _weight_names_of_config(AutoConfig.from_pretrained(str(model)))


def _weight_names_of_config(config: Any) -> WeightNames:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return weight_names_of(model)


def _as_ids(value: int | Sequence[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def weight_names_of(model: torch.nn.Module) -> WeightNames:
    """The names of a model's state; the second name of one parameter is an alias of the first.

    Raises:
        ValueError: naming a tensor for which transformers has no way back to the files' form.
    """
    from transformers import PreTrainedModel

    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            shapes[name] = tuple(tensor.shape)
        else:
            aliases[name] = first
    if not isinstance(model, PreTrainedModel):
        return WeightNames(shapes=shapes, aliases=aliases)
    form = StoredForm(model, shapes)
    if form.shapes == shapes:
        return WeightNames(shapes=shapes, aliases=aliases)
    return WeightNames(shapes=shapes, aliases=aliases, stored=form.shapes, stored_form=form)
