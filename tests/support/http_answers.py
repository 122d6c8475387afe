"""Reads answers of the HTTP server as a strict client does."""

from __future__ import annotations

import json
from typing import Any

import httpx


def strict_json(text: str) -> Any:
    """As a client in another language reads it: NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def sse_chunks(response: httpx.Response) -> list[Any]:
    """Payloads of a stream that ended as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [strict_json(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(
    response: httpx.Response, status: int, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The error of a response, after the envelope is checked."""
    assert response.status_code == status, response.text
    body = strict_json(response.text)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    for sign in ("Traceback", "<class", "object at 0x", "loc=", "pydantic", "Value error"):
        assert sign not in error["message"]
    if code is not None:
        assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param, error
    return error
