"""Prompts: where they come from, and which rank sees which."""

from __future__ import annotations

from lightning_rlhf.data.datamodule import PromptDataModule
from lightning_rlhf.data.encode import EncodedPrompt, LengthReport, Overlong, encode_prompt, encode_prompts, fit_length
from lightning_rlhf.data.loader import PromptDataLoader, PromptDataset, collate_prompts
from lightning_rlhf.data.prompts import JSONLPrompts, ListPrompts, Prompt, PromptSource, ReasoningGymPrompts
from lightning_rlhf.data.sampler import Position, PromptSampler

__all__ = [
    "EncodedPrompt",
    "JSONLPrompts",
    "LengthReport",
    "ListPrompts",
    "Overlong",
    "Position",
    "Prompt",
    "PromptDataLoader",
    "PromptDataModule",
    "PromptDataset",
    "PromptSampler",
    "PromptSource",
    "ReasoningGymPrompts",
    "collate_prompts",
    "encode_prompt",
    "encode_prompts",
    "fit_length",
]
