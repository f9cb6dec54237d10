"""A reward that a trained reward model gives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, EngineRegistry
from lightning_rlhf.types import Experience

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase


class ModelReward:
    """The value that an engine of a reward model gives to the last token of prompt and response.

    The engine is one of ``model_type="value_model"`` that is built and initialized; its back end cuts the rows into
    micro-batches as its ``EngineConfig`` says. Every rank asks it for all its rows in one call: an engine that is
    sharded over ranks needs each of them to score in every step, which they do.

    The text is encoded by the reward model's own tokenizer, EOS appended, for such models are trained to judge there.

    Args:
        engine: of the reward model.
        tokenizer: the reward model's.
        template: makes the text of a row from ``(prompt, response)``; None joins the two.
        max_length: tokens of prompt and response; a longer row fails rather than being judged by a part.

    Raises:
        ValueError: if the engine's ranks share rows, or the tokenizer has no EOS.
    """

    __name__ = "reward_model"

    def __init__(
        self,
        engine: BaseEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: Callable[[str, str], str] | None = None,
        max_length: int = 4096,
    ) -> None:
        group = engine.model_parallel_group
        if group is not None and dist.get_world_size(group) > 1:
            raise ValueError(
                "ModelReward needs an engine whose ranks each hold rows of their own: ranks of a model-parallel group "
                "score different shares of the rows. Build the reward model's engine on the back end 'torch'."
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("The reward model's tokenizer has no EOS token, at which the reward is read.")
        if max_length < 2:
            raise ValueError(f"max_length must be at least 2 tokens, got {max_length}.")
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.max_length = max_length

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str = "cpu",
        micro_batch_size: int = 8,
        template: Callable[[str, str], str] | None = None,
        max_length: int = 4096,
    ) -> ModelReward:
        """Loads a reward model whole onto this rank's device: no collective, any layout of the trainer.

        Args:
            model: a Hugging Face directory of a ``...ForSequenceClassification`` with one label, in safetensors.
            device: where it scores.
            micro_batch_size: rows in one forward.
            template: see the class.
            max_length: see the class.

        Raises:
            ValueError: if the directory holds no ``score.weight`` of one label.
        """
        from transformers import AutoTokenizer

        config = EngineConfig(role="reward_model", model=model, micro_batch_size=micro_batch_size)
        engine = EngineRegistry.new("value_model", "torch", config, device=torch.device(device))
        engine.initialize()
        _load_head(engine, Path(model))
        tokenizer = AutoTokenizer.from_pretrained(str(model))
        return cls(engine, tokenizer, template=template, max_length=max_length)

    def __call__(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float | None]:
        """One value per row, None where the row is too long. Collective if the engine is."""
        del metadata
        pairs = zip(prompts, responses, strict=True)
        template = self.template or str.__add__
        encoded = [self._encode(template(prompt, response)) for prompt, response in pairs]
        fitting = [row for row, ids in enumerate(encoded) if len(ids) <= self.max_length]
        rewards: list[float | None] = [None] * len(encoded)
        # also with no row at all: other ranks may have some
        for row, value in zip(fitting, self._values([encoded[row] for row in fitting]), strict=True):
            rewards[row] = value
        return rewards

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=True)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]  # the text begins with the one that a chat template has written
        return ids if ids and ids[-1] == eos else [*ids, eos]

    def _values(self, sequences: list[list[int]]) -> list[float]:
        # a value describes the token that is drawn from its state, so that of EOS's own state stands one further on: a
        # token that nobody reads closes each sequence
        lengths = torch.tensor([len(ids) + 1 for ids in sequences], dtype=torch.int64)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        tokens = torch.tensor([token for ids in sequences for token in (*ids, ids[-1])], dtype=torch.int64)
        last = starts[1:] - 1
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        mask[last] = True
        zeros = torch.zeros(len(tokens))
        rows = Experience(
            tokens=tokens,
            cu_seqlens=starts,
            response_mask=mask,
            loss_mask=mask,
            rollout_log_probs=zeros,
            advantages=zeros,
            uids=[str(row) for row in range(len(sequences))],
            sample_indices=[0] * len(sequences),
        )
        values = self.engine.infer_batch(rows).values
        if not sequences:
            return []
        if values is None:
            raise ValueError("The reward model's engine gave no values; its model_type must be 'value_model'.")
        return [float(value) for value in values.cpu()[last]]


def _load_head(engine: BaseEngine, directory: Path) -> None:
    """Copies the head that the reward model was saved with: an engine of a value model starts from zero."""
    from safetensors import safe_open

    heads = [value for name, value in engine.module.named_parameters() if name.endswith("score.weight")]
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if "score.weight" in file.keys() and len(heads) == 1:  # noqa: SIM118 - no mapping
                weight = file.get_tensor("score.weight")
                if weight.shape != heads[0].shape:
                    raise ValueError(
                        f"score.weight in {path} has shape {tuple(weight.shape)}, expected {tuple(heads[0].shape)}: a "
                        f"reward model has one label."
                    )
                with torch.no_grad():
                    heads[0].copy_(weight)
                return
    raise ValueError(f"{directory} holds no score.weight in safetensors, so it is no reward model with one label.")
