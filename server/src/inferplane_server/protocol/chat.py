"""``POST /v1/chat/completions``: messages in, a message out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from inferplane_server.errors import invalid
from inferplane_server.protocol.base import FreeForm, Refusal, RequestModel, is_shallow, neutral
from inferplane_server.protocol.sampling import (
    NO_STRUCTURE,
    REFUSED_SAMPLING,
    SamplingFields,
    check_logprobs_count,
)

TEMPLATE_REASON = "templates come from the model or from the server's --chat-template, never from a request"
NO_TEMPLATE_VARIABLES = {
    "chat_template": TEMPLATE_REASON,
    "tokenize": "a conversation is always rendered to text first; /tokenize answers with its tokens",
    **dict.fromkeys(
        ("tools", "messages", "add_generation_prompt", "continue_final_message"),
        "it is a field of the request itself",
    ),
}
NO_TOOLS = "this server has no parser for tool calls, and no option that would add one"


def _checked_content(content: Any) -> Any:
    """A text or a list of text parts; the tokenizer joins parts where a template cannot read them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of text parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            shown = kind if isinstance(kind, str) else "without a type"
            raise ValueError(f"this model reads text only; the content part '{shown}' is not supported")
        text = part.get(kind)
        if not isinstance(text, str):
            raise ValueError(f"a content part of type '{kind}' must have a '{kind}' that is a string")
        parts.append({"type": "text", "text": text})
    return parts


class ChatMessage(RequestModel):
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"annotations", "refusal"})
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        "audio": Refusal("this model reads text only"),
        "function_call": Refusal("it was replaced by tool_calls"),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, BeforeValidator(_checked_content)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[FreeForm] | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: ``developer`` is their ``system``, arguments of calls are objects."""
        message = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        if self.role == "developer":
            message["role"] = "system"
        message.setdefault("content", "")
        if self.tool_calls:
            message["tool_calls"] = [_with_parsed_arguments(call) for call in self.tool_calls]
        return message


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not is_shallow(arguments):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class ChatFields(RequestModel):
    """What makes the prompt of a chat; shared with ``/tokenize``."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    """None: unless the last message is to be continued."""
    continue_final_message: bool = False
    """The answer goes on where the last message, of the assistant, stops."""
    chat_template_kwargs: FreeForm | None = None
    """Variables for the template, such as switches of the model's own."""
    add_special_tokens: bool = False
    """The template writes them already."""

    def check_prompt(self) -> None:
        """Raises `ApiError` for messages that make no prompt."""
        if not self.messages:
            raise invalid("'messages' must hold at least one message.", "messages", "invalid_value")
        for name, reason in NO_TEMPLATE_VARIABLES.items():
            if name in (self.chat_template_kwargs or {}):
                where = f"chat_template_kwargs.{name}"
                raise invalid(f"'{where}' is not supported: {reason}.", where, "unsupported_parameter")
        for i, message in enumerate(self.messages):
            if message.content is None and not message.tool_calls:
                raise invalid(f"messages[{i}].content is required", f"messages[{i}].content", "invalid_value")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise invalid(
                    "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                    "continue_final_message",
                )
            if self.messages[-1].role != "assistant":
                raise invalid(
                    "'continue_final_message' needs a last message of the assistant.",
                    "continue_final_message",
                )

    @property
    def opens_answer(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def _is_plain_text_format(value: Any) -> bool:
    return value == {"type": "text"}


class ChatRequest(ChatFields, SamplingFields):
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention", "prediction", "parallel_tool_calls",
        }
    )  # fmt: skip
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **REFUSED_SAMPLING,
        "chat_template": Refusal(TEMPLATE_REASON),
        "response_format": Refusal(f'{NO_STRUCTURE}; only {{"type": "text"}} is', _is_plain_text_format),
        "functions": Refusal(NO_TOOLS, neutral([])),
        "function_call": Refusal(NO_TOOLS, neutral("none")),
        "modalities": Refusal("this model answers in text only", neutral(["text"])),
        "audio": Refusal("this model answers in text only"),
        "reasoning_effort": Refusal("this model has no levels of reasoning", neutral("none")),
        "verbosity": Refusal("this model has no levels of verbosity", neutral("medium")),
        "web_search_options": Refusal("this server does not search the web"),
        "documents": Refusal(TEMPLATE_REASON, neutral([])),
    }

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[FreeForm] | None = None
    tool_choice: str | FreeForm | None = None

    def check(self) -> None:
        """Raises `ApiError` for combinations that cannot be honoured."""
        self.check_stream()
        self.check_prompt()
        self._check_tools()
        if self.top_logprobs is not None:
            check_logprobs_count("top_logprobs", self.top_logprobs)
            if not self.logprobs:
                raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs", "invalid_value")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise invalid(
                "'max_tokens' and 'max_completion_tokens' differ; give one of them.", "max_completion_tokens"
            )
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise invalid(f"{name} must be at least 1, got 0", name, "invalid_value")

    def _check_tools(self) -> None:
        """Tools that the model must not call make no difference; any other use needs what is not here."""
        if self.tool_choice in (None, "none"):
            if self.tools and self.tool_choice is None:
                raise invalid(f"'tools' is not supported: {NO_TOOLS}.", "tools", "unsupported_parameter")
        elif not self.tools and self.tool_choice != "auto":
            raise invalid(
                "'tool_choice' asks for a tool, but 'tools' names none.", "tool_choice", "invalid_value"
            )
        elif self.tools:
            raise invalid(f"'tools' is not supported: {NO_TOOLS}.", "tools", "unsupported_parameter")

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
