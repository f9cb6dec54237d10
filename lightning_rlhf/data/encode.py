"""From a prompt to its token ids: the chat template applied once, one BOS, and a stated rule for the length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lightning_rlhf.data.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["error", "drop", "truncate_left"]


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt with the ids that the policy is asked with.

    Attributes:
        prompt: as its source gave it.
        token_ids: chat template applied, BOS included, within the length limit.
    """

    prompt: Prompt
    token_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """What the length rule did.

    Attributes:
        total: prompts before the rule.
        dropped: uids of prompts that were left out.
        truncated: uids of prompts that lost their first tokens.
        longest: length of the longest prompt before the rule, in tokens.
    """

    total: int
    dropped: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)
    longest: int


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, str]],
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt; the one place where prompts become ids, for training and evaluation alike.

    With a chat template, a text is a chat of one user message; the template decides about BOS, and nothing is added to
    what it renders. A chat that ends with an assistant's message is continued, any other is answered. Without a
    template, a text is encoded with exactly one BOS in front if the tokenizer has a BOS token, and no EOS.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: a text or a list of chat messages.
        chat_template_kwargs: further variables of the template (such as ``enable_thinking``).

    Raises:
        ValueError: if a chat meets a tokenizer without a chat template, or the prompt has no tokens.
    """
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prefilled = chat[-1]["role"] == "assistant"
        ids = tokenizer.apply_chat_template(
            chat,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            **(chat_template_kwargs or {}),
        )
    elif isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        if tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
            ids = [tokenizer.bos_token_id, *ids]
    else:
        raise ValueError(
            "The prompt is a chat, but the tokenizer has no chat template. Give plain-text prompts, or set "
            "tokenizer.chat_template."
        )
    if not ids:
        raise ValueError(f"The prompt {prompt!r} has no tokens.")
    return list(ids)


def fit_length(token_ids: list[int], *, max_tokens: int | None, overlong: Overlong) -> list[int] | None:
    """Applies the length rule to one prompt.

    Returns:
        The ids; the last ``max_tokens`` of them where the rule is ``truncate_left``; None where it is ``drop``.

    Raises:
        ValueError: if the prompt is too long and the rule is ``error``.
    """
    if max_tokens is None or len(token_ids) <= max_tokens:
        return token_ids
    if overlong == "drop":
        return None
    if overlong == "truncate_left":
        return token_ids[-max_tokens:]
    raise ValueError(
        f"{len(token_ids)} tokens, but max_prompt_tokens={max_tokens}. Raise the limit, or pass overlong='drop' or "
        "overlong='truncate_left'."
    )


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    *,
    max_prompt_tokens: int | None,
    overlong: Overlong,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[EncodedPrompt], LengthReport]:
    """Encodes all prompts, in order, under one length rule.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompts: as loaded from their source.
        max_prompt_tokens: most tokens of a prompt; None for no limit.
        overlong: what happens to a longer one: ``error``, ``drop``, or ``truncate_left`` (its last tokens stay).
        chat_template_kwargs: further variables of the chat template.

    Returns:
        The prompts that are left, and what the rule did.

    Raises:
        ValueError: naming the prompt, if one cannot be encoded or is too long under ``error``.
    """
    encoded: list[EncodedPrompt] = []
    dropped: list[str] = []
    truncated: list[str] = []
    longest = 0
    for prompt in prompts:
        try:
            ids = encode_prompt(tokenizer, prompt.prompt, chat_template_kwargs=chat_template_kwargs)
            fitted = fit_length(ids, max_tokens=max_prompt_tokens, overlong=overlong)
        except ValueError as error:
            raise ValueError(f"Prompt {prompt.uid!r}: {error}") from error
        longest = max(longest, len(ids))
        if fitted is None:
            dropped.append(prompt.uid)
            continue
        if len(fitted) < len(ids):
            truncated.append(prompt.uid)
        encoded.append(EncodedPrompt(prompt=prompt, token_ids=fitted))
    return encoded, LengthReport(total=len(prompts), dropped=dropped, truncated=truncated, longest=longest)
