"""The ids between two turns of the policy: the end of its turn, the observation, the head of its next turn.

They are encoded by themselves and appended. What was sampled is never decoded and encoded again, since other ids could
come out, for which neither log-probs nor keys and values exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER, _OBSERVATION = "firstturnoftheassistant", "observationbetweenturns"


class TurnTokens:
    """Encodes observations for one tokenizer.

    With a chat template, what stands between two turns is read off it: a chat of two messages is rendered with marks in
    place of their contents. Without one, the observation is appended as it is.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template_kwargs: further variables of the template, as for the prompts.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._around: dict[str, tuple[str, str]] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def between(
        self,
        turn_ids: Sequence[int],
        observation: str,
        *,
        role: str = "user",
        max_observation_tokens: int | None = None,
    ) -> list[int]:
        """The ids that follow the policy's turn, up to where it samples again.

        An observation is data: where it spells a special token, such as the one that ends a turn, it gives that word's
        letters and not the token.

        Args:
            turn_ids: the policy's turn as sampled. If its last id is the one that ends a turn in the template, it is
                not repeated.
            observation: the text.
            role: who speaks it.
            max_observation_tokens: the observation's tokens beyond these are left out; None keeps all.

        Raises:
            ValueError: if the template does not simply go on after an assistant's message, or refuses the role.
        """
        before, after = self._parts(role)
        ids = self._encode_whole(before, observation, after, max_observation_tokens)
        if ids and turn_ids and before and turn_ids[-1] == ids[0] and ids[0] in self._tokenizer.all_special_ids:
            ids = ids[1:]
        return ids

    def _encode_whole(self, before: str, observation: str, after: str, limit: int | None) -> list[int]:
        spelled = any(token in observation for token in self._tokenizer.all_special_tokens)
        if not spelled and (limit is None or len(self._encode(observation)) <= limit):
            return self._encode(before + observation + after)
        inner = self._encode(observation, split_special_tokens=True)[:limit]
        return [*self._encode(before), *inner, *self._encode(after)]

    def _encode(self, text: str, **kwargs: Any) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, **kwargs)) if text else []

    def _parts(self, role: str) -> tuple[str, str]:
        """The template's text from the end of an assistant's message to the observation, and from there on."""
        if self._tokenizer.chat_template is None:
            return "", ""
        if role not in self._around:
            self._around[role] = self._read_off(role)
        return self._around[role]

    def _read_off(self, role: str) -> tuple[str, str]:
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
        try:
            ended = self._render(chat)
            going_on = self._render([*chat, {"role": role, "content": _OBSERVATION}], add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes, jinja2's errors among it
            raise ValueError(
                f"The chat template refuses a message by {role!r} after the assistant's: {error}. Give observations "
                f"another role, 'user' or 'tool'."
            ) from error
        end = ended.partition(_ANSWER)[2]
        rest = going_on.partition(_ANSWER)[2]
        if ended.count(_ANSWER) != 1 or going_on.count(_ANSWER) != 1 or rest.count(_OBSERVATION) != 1:
            raise ValueError(
                f"The chat template does not render each message once, as it is: {going_on!r}. Turns cannot be "
                "appended with it; set another tokenizer.chat_template."
            )
        if not rest.startswith(end):
            raise ValueError(
                f"The chat template ends an assistant's last message by {end!r}, but goes on by {rest!r}: a further "
                "message changes what stands before it, so turns cannot be appended. Set another "
                "tokenizer.chat_template."
            )
        before, _, after = rest.partition(_OBSERVATION)
        return before, after

    def _render(self, chat: list[dict[str, str]], **kwargs: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(chat, tokenize=False, **{**self._template_kwargs, **kwargs})
        return text
