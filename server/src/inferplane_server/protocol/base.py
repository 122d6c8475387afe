"""What all requests have in common: which fields are accepted, and how others are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from inferplane_server.errors import invalid

MAX_DEPTH = 64
"""Of objects and lists within each other, where a request may nest them as it likes."""
MAX_NAME_CHARS = 100
"""Of an unknown field's name in the answer, and in the search for what was meant."""


@dataclass(frozen=True)
class Refusal:
    """A documented field that this server does not honour.

    A value that asks for nothing passes; any other would change the answer and is refused, never ignored.
    """

    reason: str
    is_neutral: Callable[[Any], bool] = lambda value: False


def neutral(*values: Any) -> Callable[[Any], bool]:
    """These values ask for nothing. True is not 1 here."""
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def _not_too_deep(value: dict[str, Any]) -> dict[str, Any]:
    if not is_shallow(value):
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
    return value


def is_shallow(value: Any) -> bool:
    """Whether objects and lists are nested no deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        items = (
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        )
        level = list(chain.from_iterable(items))
    return not level


FreeForm = Annotated[dict[str, Any], AfterValidator(_not_too_deep)]
"""An object whose inside is for a template, a plugin or nobody: no model describes it, but it is walked recursively."""


class RequestModel(BaseModel):
    """Base of all request bodies. A field given as null is a field not given; unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    REFUSED: ClassVar[Mapping[str, Refusal]] = {}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Documented fields that cannot change the answer: bookkeeping of OpenAI's own service."""

    @model_validator(mode="before")
    @classmethod
    def _screen_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None or name in cls.WITHOUT_EFFECT:
                continue
            if refusal := cls.REFUSED.get(name):
                if not refusal.is_neutral(value):
                    raise invalid(
                        f"'{name}' is not supported: {refusal.reason}", name, "unsupported_parameter"
                    )
                continue
            if name not in cls.model_fields:
                name = name[:MAX_NAME_CHARS]
                raise invalid(_unknown_field(name, cls.model_fields), name, "unknown_parameter")
            kept[name] = value
        return kept


def _unknown_field(name: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"'{name}' is not a field of this request" + (f"; did you mean '{close[0]}'?" if close else ".")


class AnyRequest(BaseModel):
    """A body of which only the model's name matters."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
