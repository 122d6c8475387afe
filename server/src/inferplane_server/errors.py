"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}`` under a fitting status."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from inferplane.engine.errors import (
    EngineDeadError,
    PromptError,
    PromptTooLongError,
    QueueFullError,
    RequestTooLargeError,
    TaskError,
)
from inferplane.request import ParameterError
from inferplane.tokenizer import ChatTemplateError

logger = logging.getLogger(__name__)

MAX_SHOWN_CHARS = 80
MAX_SHOWN_ERRORS = 3


class ApiError(Exception):
    """An answer that is not a success. Raised anywhere below a route, it becomes the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, headers=self.headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    """503 for what another try later, here or elsewhere, can mend."""
    return ApiError(503, message, type="server_error", code=code, headers={"Retry-After": str(retry_after_s)})


def engine_failure(message: str, request_id: str) -> ApiError:
    return ApiError(
        500, f"Request {request_id} failed in the engine: {message}", type="server_error", code="engine_error"
    )


def as_api_error(error: Exception) -> ApiError:
    """Translates what the engine, the validation or the framework raised; 500 for anything not foreseen."""
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return invalid(str(error), "prompt", "context_length_exceeded")
        case PromptError():
            return invalid(str(error), "prompt", "invalid_prompt")
        case TaskError():
            return invalid(str(error), "model", "unsupported_endpoint")
        case ChatTemplateError():
            return invalid(str(error), "messages", "chat_template_error")
        case QueueFullError():
            return unavailable(str(error), "queue_full")
        case EngineDeadError():
            return unavailable(str(error), "engine_dead", retry_after_s=10)
        case ParameterError() | RequestTooLargeError():
            return invalid(str(error), error.param, "invalid_value")
        case ValidationError() | RequestValidationError():
            return from_validation(error)
        case HTTPException():
            return _from_http(error)
        case _:
            return ApiError(
                500,
                "The server met an error that it did not foresee; its log has the details.",
                type="server_error",
            )


def from_validation(error: ValidationError | RequestValidationError) -> ApiError:
    """One sentence for each of the first few faults, with the value seen as JSON."""
    faults = list(error.errors())
    sentences = [_sentence(fault) for fault in faults[:MAX_SHOWN_ERRORS]]
    if len(faults) > MAX_SHOWN_ERRORS:
        sentences.append(f"and {len(faults) - MAX_SHOWN_ERRORS} more")
    return invalid("; ".join(sentences), _path(faults[0]["loc"]) or None, "invalid_value")


def _sentence(fault: Any) -> str:
    where = _path(fault["loc"]) or "the body"
    match fault["type"]:
        case "missing":
            return f"{where} is required"
        case "extra_forbidden":
            return f"{where} is not a field of this request"
        case "value_error":
            return f"{where}: {fault['ctx']['error']}"
    return f"{where}: {fault['msg']}, got {_shown(fault['input'])}"


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _shown(value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, msgspec.MsgspecError):
        return "something else"
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def _from_http(error: HTTPException) -> ApiError:
    headers = dict(error.headers or {})
    match error.status_code:
        case 404:
            return ApiError(
                404,
                "There is no such route; /v1/models, /v1/completions and /v1/chat/completions are.",
                code="unknown_url",
            )
        case 405:
            allowed = headers.get("Allow") or headers.get("allow")
            message = "This route does not take this method" + (f"; it takes {allowed}" if allowed else "")
            return ApiError(405, message, code="method_not_allowed", headers=headers)
    message = error.detail if isinstance(error.detail, str) else HTTPStatus(error.status_code).phrase
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return ApiError(error.status_code, message, type=kind, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        api_error = as_api_error(error)
        if api_error.status >= 500 and not isinstance(error, ApiError | EngineDeadError | QueueFullError):
            name = request.scope.get("request_id", "without an id")
            logger.error("%s %s failed, request %s", request.method, request.url.path, name, exc_info=error)
        return api_error.response()

    handled = (
        ApiError, ParameterError, PromptError, RequestTooLargeError, ChatTemplateError, QueueFullError, EngineDeadError,
        TaskError, ValidationError, RequestValidationError, HTTPException, Exception,
    )  # fmt: skip
    for kind in handled:
        app.add_exception_handler(kind, answer)
