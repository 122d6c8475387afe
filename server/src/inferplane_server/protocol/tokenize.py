"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import RootModel, model_validator

from inferplane_server.errors import invalid
from inferplane_server.protocol.base import Refusal, RequestModel
from inferplane_server.protocol.chat import TEMPLATE_REASON, ChatFields


class TokenizeTextRequest(RequestModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatFields):
    REFUSED: ClassVar[Mapping[str, Refusal]] = {"chat_template": Refusal(TEMPLATE_REASON)}

    model: str | None = None
    return_token_strs: bool = False


class TokenizeRequest(RootModel[TokenizeTextRequest | TokenizeChatRequest]):
    """Either of the two, told apart by ``messages``."""

    @model_validator(mode="before")
    @classmethod
    def _choose(cls, data: Any) -> Any:
        if (data.get("prompt") is None) == (data.get("messages") is None):
            raise invalid("Give either 'prompt' or 'messages'.", "prompt", "invalid_value")
        kind = TokenizeTextRequest if data.get("messages") is None else TokenizeChatRequest
        return kind.model_validate(data)


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[int]
