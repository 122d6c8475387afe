"""``POST /v1/embeddings``, ``/classify``, ``/score`` and ``/rerank``: a vector or a number for each text, no tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from inferplane_server.errors import invalid
from inferplane_server.protocol.base import Refusal, RequestModel, neutral
from inferplane_server.protocol.completions import RawPrompt, as_prompt_list

MAX_INPUTS = 2048

_TEXT_OR_LIST = Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}]})
_TRUNCATION = Refusal("a text that is too long is refused, not cut", neutral("NONE", False))


def _as_input_list(value: Any) -> Any:
    return as_prompt_list(value, MAX_INPUTS)


def _as_text_list(value: Any) -> Any:
    """A text or a list of texts; a text may be written as ``{"text": …}``. ``ValueError`` says what it may be."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text or a list of texts, and not empty")
    if len(value) > MAX_INPUTS:
        raise ValueError(f"has {len(value)} texts, at most {MAX_INPUTS} go into one request")
    texts = [each["text"] if isinstance(each, dict) and each.keys() == {"text"} else each for each in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError('each entry must be a text, or an object {"text": …}')
    return texts


Inputs = Annotated[list[RawPrompt], BeforeValidator(_as_input_list), _TEXT_OR_LIST]
Texts = Annotated[list[str], BeforeValidator(_as_text_list), _TEXT_OR_LIST]


class PoolingFields(RequestModel):
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"user", "metadata"})
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        "truncate_prompt_tokens": _TRUNCATION,
        "truncate": _TRUNCATION,
        "truncation": _TRUNCATION,
    }

    model: str | None = None
    priority: int = 0
    cache_salt: str | None = None


class EmbeddingRequest(PoolingFields):
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **PoolingFields.REFUSED,
        "messages": Refusal("only 'input' is embedded"),
    }

    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    add_special_tokens: bool = True


class ClassifyRequest(PoolingFields):
    input: Inputs
    use_activation: bool = True
    add_special_tokens: bool = True


class ScoreRequest(PoolingFields):
    """Texts under either pair of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    use_activation: bool = True

    def pairs(self) -> tuple[list[str], list[str]]:
        """Queries and documents. Raises `ApiError` unless both are given, once."""
        queries = [each for each in (self.text_1, self.queries) if each is not None]
        documents = [each for each in (self.text_2, self.documents) if each is not None]
        if len(queries) != 1 or len(documents) != 1:
            raise invalid(
                "Give 'text_1' and 'text_2' or, in their place, 'queries' and 'documents'.",
                "text_1",
                "invalid_value",
            )
        return queries[0], documents[0]


class RerankRequest(PoolingFields):
    REFUSED: ClassVar[Mapping[str, Refusal]] = {
        **PoolingFields.REFUSED,
        "max_tokens_per_doc": _TRUNCATION,
        "max_chunks_per_doc": _TRUNCATION,
        "rank_fields": Refusal("a document is one text"),
    }

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True
    use_activation: bool = True
