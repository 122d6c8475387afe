"""Chat templates: messages to prompt text, by the Jinja program that a model ships.

A template is a program of whoever published the model, so it runs in a sandbox and sees plain data only. It
comes from the model or from the operator, never from a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, Any]]

# Marks where the text that is to be continued ends; no template trims or escapes letters.
_END_OF_CONTINUED = "INFERPLANEENDOFCONTINUED"
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(ValueError):
    """A conversation that a template refuses or cannot render, or a template that is none."""


class ChatTemplate:
    """One or more named templates of a model. Compiled on first use, because Jinja takes a while to import."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        if not sources:
            raise ChatTemplateError("a chat template needs at least one source")
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, Template] = {}

    @property
    def source(self) -> str:
        """Of the default template."""
        return self.sources[self._name(None)]

    def check(self) -> None:
        """Raises `ChatTemplateError` unless every template is valid Jinja. What it does with messages shows later."""
        for name in self.sources:
            self._compile(name)

    def render(
        self,
        /,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt. ``continue_final_message`` leaves the last message open, so that the model goes on with it.

        Raises `ChatTemplateError` with what the template said.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        if not messages:
            raise ChatTemplateError("a conversation needs at least one message")
        conversation = [_plain_message(message) for message in messages]
        if not self.accepts_parts:
            conversation = [_with_joined_text(message) for message in conversation]
        if continue_final_message:
            _mark_end(conversation)
        template = self._compile(self._name(tools))
        values = {
            **self.special_tokens,
            **_plain(variables),
            "messages": conversation,
            "tools": _plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        text = _run(template, values)
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def accepts_parts(self) -> bool:
        """Whether the template reads content that is a list of ``{"type": "text"}`` parts, found out by trying."""
        parts = [{"type": "text", "text": "probe"}]
        try:
            text = _run(
                self._compile(self._name(None)),
                {
                    **self.special_tokens,
                    "messages": [{"role": "user", "content": parts}],
                    "tools": None,
                    "add_generation_prompt": False,
                },
            )
        except ChatTemplateError:
            return False
        return "probe" in text and "'text'" not in text and '"text"' not in text

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if tools and "tool_use" in self.sources:
            return "tool_use"
        if "default" in self.sources:
            return "default"
        if len(self.sources) == 1:
            return next(iter(self.sources))
        raise ChatTemplateError(
            f"none of the model's chat templates ({', '.join(self.sources)}) is the default one"
        )

    def _compile(self, name: str) -> Template:
        if name not in self._compiled:
            from jinja2 import TemplateSyntaxError

            try:
                self._compiled[name] = _environment().from_string(self.sources[name])
            except TemplateSyntaxError as error:
                raise ChatTemplateError(
                    f"the chat template is no valid Jinja: line {error.lineno}: {error}"
                ) from error
            except RecursionError as error:
                raise ChatTemplateError("the chat template is nested too deeply to be read") from error
        return self._compiled[name]


def _run(template: Template, variables: Mapping[str, Any]) -> str:
    """``variables`` may have any names, those of a function's own arguments among them."""
    from jinja2 import TemplateError

    try:
        return template.render(variables)
    except TemplateError as error:
        raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
    # a template is a program: whatever it trips over, the messages did not suit it
    except Exception as error:
        raise ChatTemplateError(
            f"the chat template fails on these messages: {type(error).__name__}: {error}"
        ) from error


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect that published templates are written in, which is that of transformers."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %} … {% endgeneration %}`` renders as what it holds."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would end up in prompts."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain(value: Any) -> Any:
    """A copy in plain JSON types: methods of richer objects would be open to the template."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise ChatTemplateError(f"a chat template takes JSON values only, not {type(value).__name__}")


def _plain_message(message: object) -> dict[str, Any]:
    """Absent and null mean the same to clients, but templates ask whether a key is there."""
    if not isinstance(message, Mapping):
        raise ChatTemplateError(
            f"a message should be an object with role and content, not {type(message).__name__}"
        )
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((plain[field] for field in _REASONING_FIELDS if field in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _with_joined_text(message: dict[str, Any]) -> dict[str, Any]:
    """Content parts as one text, where all of them are text."""
    parts = message.get("content")
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" for part in parts
    ):
        return message
    return {**message, "content": "\n".join(str(part.get("text", "")) for part in parts)}


def _mark_end(conversation: list[dict[str, Any]]) -> None:
    content = conversation[-1].get("content")
    if isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        content[-1]["text"] = content[-1]["text"] + _END_OF_CONTINUED
    elif isinstance(content, str):
        conversation[-1]["content"] = content + _END_OF_CONTINUED
    else:
        raise ChatTemplateError("continue_final_message needs a last message with text to continue")


def _cut_at_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_END_OF_CONTINUED)
    if not mark:
        raise ChatTemplateError(
            "the chat template leaves out the last message, so that it cannot be continued"
        )
    return before
