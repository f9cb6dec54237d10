"""From tensors as transformers holds them to those of a model's files, whose names alone vLLM's loader knows.

transformers 5 keeps all experts of a layer in one tensor, and calls some layers otherwise than files do. Its
``save_pretrained`` undoes that by each architecture's own conversions, and so does this, a few tensors at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StoredForm:
    """A model's way from its own tensors to those of its files.

    Args:
        model: any instance; one on the meta device will do. It is kept.
        shapes: by name, the tensors that the model holds, tied ones once.

    Attributes:
        shapes: by name, the tensors that its files hold.

    Raises:
        ValueError: naming a tensor that has no such way, or two tensors of one name that are not the same.
    """

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model = model
        own = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        in_files = self._revert(own)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in in_files.items()}
        self._groups = {
            name: group
            for group in self._made_together(own)
            for name in group
            if len(group) > 1 or in_files.get(name) is not own[name]
        }
        self._check_groups(own)

    def convert(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes tensors on in the files' form; those that are in it already come as they are.

        Args:
            named_tensors: in any order. One that makes a tensor of the files with others is copied until they are here.
        """
        waiting: dict[frozenset[str], dict[str, Tensor]] = {}
        for name, tensor in named_tensors:
            group = self._groups.get(name)
            if group is None:
                yield name, tensor
            elif len(group) == 1:
                yield from self._revert({name: tensor}).items()
            else:
                held = waiting.setdefault(group, {})
                held[name] = tensor.clone()
                if len(held) == len(group):
                    yield from self._revert(waiting.pop(group)).items()

    def _revert(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        reverted: dict[str, Tensor] = revert_weight_conversion(self._model, named)
        return reverted

    def _made_together(self, own: Mapping[str, Tensor]) -> set[frozenset[str]]:
        """The model's tensors, those together that some tensor of the files is made of."""
        group_of_stored: dict[str, frozenset[str]] = {}
        for name, tensor in own.items():
            try:
                parts = self._revert({name: tensor})
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"{type(self._model).__name__}: transformers cannot say which tensors of its files {name!r} "
                    f"stands for ({error}), so vLLM cannot be given it."
                ) from error
            group = frozenset({name}).union(*(group_of_stored.get(part, ()) for part in parts))
            others = [part for part, of in group_of_stored.items() if of <= group] if len(group) > 1 else []
            group_of_stored.update(dict.fromkeys([*parts, *others], group))
        return set(group_of_stored.values())

    def _check_groups(self, own: Mapping[str, Tensor]) -> None:
        """A push comes a few tensors at a time, and in either form: both must lead to the files' tensors."""
        made: dict[str, tuple[int, ...]] = {}
        for group in set(self._groups.values()):
            made.update((name, tuple(part.shape)) for name, part in self._revert({n: own[n] for n in group}).items())
            if twice := sorted(group & self.shapes.keys()):
                raise ValueError(
                    f"{type(self._model).__name__}: files have a tensor {twice[0]!r} that is not the model's of this "
                    f"name, so a push cannot say which of them it brings."
                )
        expected = {name: shape for name, shape in self.shapes.items() if name not in own}
        wrong = sorted(name for name in expected.keys() | made.keys() if expected.get(name) != made.get(name))
        if wrong:
            raise ValueError(
                f"{type(self._model).__name__}: {wrong[0]!r} of its files is shaped {expected.get(wrong[0])} when it "
                f"is made with all others and {made.get(wrong[0])} when it is made with those that it is made of."
            )
