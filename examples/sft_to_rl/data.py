"""Sums in one line, and the batches that supervised fine-tuning takes."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

SUMS = [(f"{a} + {b} =", str(a + b)) for a in range(5) for b in range(5)]


class SumsDataModule(pl.LightningDataModule):
    """Pairs of prompt and answer; the loss is on the answer alone.

    Args:
        model_name: where the tokenizer is.
        batch_size: pairs in a batch.
    """

    def __init__(self, model_name: str, batch_size: int = 8) -> None:
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(model_name)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(SUMS, batch_size=self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(SUMS, batch_size=self.batch_size, collate_fn=self.collate)

    def collate(self, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
        rows = [self._encode(prompt, answer) for prompt, answer in pairs]
        longest = max(len(tokens) for tokens, _ in rows)

        def padded(row: list[int], value: int) -> list[int]:
            return row + [value] * (longest - len(row))

        return {
            "input_ids": torch.tensor([padded(tokens, self.tokenizer.pad_token_id) for tokens, _ in rows]),
            "attention_mask": torch.tensor([padded([1] * len(tokens), 0) for tokens, _ in rows]),
            "labels": torch.tensor([padded(labels, -100) for _, labels in rows]),
        }

    def _encode(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        chat = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        after = self.tokenizer(answer + self.tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        return before + after, [-100] * len(before) + after
