"""``POST /v1/completions``: text in, text out, no chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from inferplane_server.errors import invalid
from inferplane_server.protocol.base import Refusal, neutral
from inferplane_server.protocol.sampling import REFUSED_SAMPLING, SamplingFields, check_logprobs_count

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_COMPLETIONS = 2048
"""Over all prompts of one request, each with its n."""

RawPrompt = str | list[int]


def as_prompt_list(value: Any, most: int = MAX_PROMPTS) -> Any:
    """All four forms of ``prompt`` as a list of texts and token lists. ``ValueError`` says what it may be."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(
            "must be a text, a list of texts, a list of token ids, or a list of such lists, and not empty"
        )
    if _are_token_ids(value):
        return [value]
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, list) and _are_token_ids(item)):
            raise ValueError(
                "each entry must be a text or a list of token ids, all entries together one list"
            )
    if len(value) > most:
        raise ValueError(f"has {len(value)} prompts, at most {most} go into one request")
    return value


def _are_token_ids(values: list[Any]) -> bool:
    """Whole numbers, which JSON's true and false are not. Looks at types only: there may be a hundred thousand."""
    return set(map(type, values)) <= {int}


class CompletionRequest(SamplingFields):
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"user", "metadata", "store"})
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **REFUSED_SAMPLING,
        "suffix": Refusal("text cannot be inserted before a suffix; it is only continued", neutral("")),
        "response_format": Refusal('only {"type": "text"} is', lambda v: v == {"type": "text"}),
        "chat_template": Refusal("completions use no chat template"),
    }

    prompt: Annotated[list[Any], BeforeValidator(as_prompt_list)] = Field(
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}]}
    )
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        """Raises `ApiError` for combinations that cannot be honoured."""
        self.check_stream()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid(
                "'best_of' is not supported unless it equals 'n': candidates are not ranked.",
                "best_of",
                "unsupported_parameter",
            )
        num_completions = len(self.prompt) * (self.n or 1)
        if num_completions > MAX_COMPLETIONS:
            asked = f"{len(self.prompt)} prompts with n={self.n or 1} are {num_completions} completions"
            raise invalid(f"{asked}; at most {MAX_COMPLETIONS} go into one request", "n", "invalid_value")
        if self.logprobs is not None:
            check_logprobs_count("logprobs", self.logprobs)

    @property
    def prompts(self) -> list[RawPrompt]:
        return self.prompt
