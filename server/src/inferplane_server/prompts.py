"""From what a request brought to token ids, with every check that can be made before anything runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from inferplane.api.engine import Engine
from inferplane.engine.errors import EmptyPromptError, PromptTooLongError
from inferplane.tokenizer import ChatTemplateError, Tokenizer
from inferplane.tokenizer.chat_template import ChatTemplate
from inferplane_server.errors import invalid
from inferplane_server.protocol.chat import ChatFields
from inferplane_server.protocol.completions import RawPrompt

LARGE_CHAT_CHARS = 64 * 2**10
"""From here on rendering takes milliseconds, which other requests should not wait for."""


async def encode_prompts(
    engine: Engine, prompts: Sequence[RawPrompt], *, add_special_tokens: bool, max_tokens: int | None
) -> list[list[int]]:
    """Token ids of each prompt. All are checked here, so that a batch is refused before any of it has run.

    Raises `EmptyPromptError`, `PromptTooLongError`, or `ApiError` for ids that the model does not have.
    """

    max_model_len = engine.config.model.max_model_len

    async def encode(prompt: RawPrompt) -> list[int]:
        if isinstance(prompt, str):
            check_long_text(engine, prompt, max_tokens)
            return await engine.encode_prompt(prompt, add_special_tokens=add_special_tokens)
        return prompt

    encoded = await asyncio.gather(*(encode(prompt) for prompt in prompts))
    for token_ids in encoded:
        check_prompt(token_ids, engine.config.model.vocab_size, max_model_len, max_tokens)
    return encoded


def check_long_text(engine: Engine, text: str, max_tokens: int | None = None) -> None:
    """Megabytes of text take many seconds and a hundred times their size in memory to encode: too much, where all that
    can come of it is that they are too long. Raises `PromptTooLongError`."""
    max_model_len = engine.config.model.max_model_len
    if len(text) >= LARGE_CHAT_CHARS and (floor := engine.tokenizer.min_num_tokens(text)) > max_model_len:
        raise PromptTooLongError(floor, max_model_len, is_exact=False, needs_room=max_tokens != 0)


def check_prompt(
    token_ids: Sequence[int], vocab_size: int, max_model_len: int, max_tokens: int | None
) -> None:
    if not token_ids:
        raise EmptyPromptError
    # a prompt that is only scored needs no room for an answer
    if len(token_ids) > max_model_len - (max_tokens != 0):
        raise PromptTooLongError(len(token_ids), max_model_len, needs_room=max_tokens != 0)
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:
            raise invalid(
                f"the prompt has token {extreme}, but the vocabulary has tokens 0 to {vocab_size - 1}",
                "prompt",
                "invalid_value",
            )


class ChatPrompts:
    """Renders conversations with the model's template, or with the operator's in its place."""

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._override = ChatTemplate({"default": template}, tokenizer.special_tokens) if template else None

    @property
    def source(self) -> str | None:
        """The template in use; None when there is none, and conversations are refused."""
        return self._override.source if self._override else self._tokenizer.chat_template

    def warm_up(self) -> None:
        """Compiles the template, which takes Jinja a while, before the first caller has to wait for it."""
        if self.source is None:
            return
        chat = ChatFields.model_validate({"messages": [{"role": "user", "content": "hello"}]})
        # a template that cannot render this much refuses it again when a caller is there to be told
        with suppress(ChatTemplateError):
            self._render(chat)

    async def render(self, chat: ChatFields) -> str:
        """The prompt's text. Raises `ChatTemplateError` for messages that the template does not take."""
        size = sum(len(str(message.content)) for message in chat.messages)
        if size < LARGE_CHAT_CHARS:
            return self._render(chat)
        return await asyncio.to_thread(self._render, chat)

    def _render(self, chat: ChatFields) -> str:
        apply = self._override.render if self._override else self._tokenizer.apply_chat_template
        return apply(
            [message.for_template() for message in chat.messages],
            add_generation_prompt=chat.opens_answer,
            continue_final_message=chat.continue_final_message,
            **(chat.chat_template_kwargs or {}),
        )
