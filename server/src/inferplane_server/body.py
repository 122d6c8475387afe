"""Reads a JSON body within a limit of bytes, and checks it against a model of the protocol."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from inferplane_server.errors import ApiError, from_validation, invalid

Model = TypeVar("Model", bound=BaseModel)

LARGE_BODY_BYTES = 256 * 2**10
"""From here on parsing takes milliseconds, which other requests should not wait for."""

MAX_DISCARDED_BYTES = 256 * 2**20
"""A caller who sends too much is read on for this long: many clients only look for the answer after sending it all."""


MAX_PAUSE_S = 60.0
"""Between two pieces of a body: a caller who is slow is waited for, one who has stopped holds nothing for ever."""


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads its body by `read_body`, for the documentation under ``/docs``."""
    schema = model.model_json_schema()
    inlined = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """Puts definitions in place of references, which would not resolve from within an OpenAPI document."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if reference := schema.get("$ref"):
        return _inline(definitions[reference.rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}


async def read_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The body as ``model``.

    Raises `ApiError`: 415 for another content type, 413 above ``max_bytes``, 400 for what does not parse or fit.
    """
    _check_content_type(request)
    raw = await _read(request, max_bytes)
    if len(raw) < LARGE_BODY_BYTES:
        return _parse(raw, model)
    return await asyncio.to_thread(_parse, raw, model)


def _check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(
            415,
            f"The body must be sent as 'Content-Type: application/json', not '{content_type}'.",
            code="unsupported_media_type",
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    is_too_large = declared.isdigit() and int(declared) > max_bytes
    if is_too_large and request.headers.get("expect", "").lower() == "100-continue":
        raise _too_large(max_bytes)  # this caller asks before it sends
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(MAX_PAUSE_S) as patience:
            async for chunk in request.stream():
                patience.reschedule(asyncio.get_running_loop().time() + MAX_PAUSE_S)
                size += len(chunk)
                if size > max_bytes:
                    is_too_large = True
                    chunks.clear()
                if size > MAX_DISCARDED_BYTES:
                    break
                if not is_too_large:
                    chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body stopped coming for {MAX_PAUSE_S:g} s before it was complete.",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "The connection closed before the body was complete.") from None
    if is_too_large:
        raise _too_large(max_bytes)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than this server takes: at most {max_bytes} bytes (--max-body-bytes).",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _parse(raw: bytes, model: type[Model]) -> Model:
    if not raw.strip():
        raise invalid("The body is empty; a JSON object is expected.", code="invalid_json")
    try:
        data: Any = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None
