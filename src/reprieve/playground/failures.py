"""Errors as OpenAI's clients read them: a status, and a body that names the field."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from reprieve.errors import ContextOverflowError, ReprieveError, SpecError
from reprieve.playground.bodies import MalformedBodyError
from reprieve.playground.protocol import error_body
from reprieve.playground.worker import QueueFullError, StoppedError
from reprieve.vllm_plugin.policy import RequestError


class TimedOut(Exception):
    """A request exceeded the time limit."""


class UnknownModelError(RequestError):
    """A model that is not served here."""


class Disconnected(Exception):
    """The client disconnected."""


# What the routes may raise.
KINDS = (HTTPException, ReprieveError, TimedOut, Disconnected, Exception)


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an error."""
    if isinstance(error, HTTPException):
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return error.status_code, error_body(str(error.detail), kind=kind, code=error.status_code)
    if isinstance(error, UnknownModelError):
        return 404, error_body(str(error), kind="not_found_error", param="model", code="model_not_found")
    if isinstance(error, RequestError | MalformedBodyError):
        return 400, error_body(str(error), kind="invalid_request_error", param=error.parameter, code=400)
    if isinstance(error, QueueFullError):
        return 429, error_body(str(error), kind="rate_limit_error", code=429)
    if isinstance(error, StoppedError):
        return 503, error_body(str(error), kind="service_unavailable_error", code=503)
    if isinstance(error, TimedOut):
        return 504, error_body(str(error), kind="timeout_error", code=504)
    if isinstance(error, Disconnected):
        return 499, error_body("the client went away", kind="disconnected", code=499)
    if isinstance(error, ContextOverflowError):
        return 400, error_body(str(error), kind="invalid_request_error", param="max_tokens", code="context_length")
    if isinstance(error, SpecError):
        return 400, error_body(str(error), kind="invalid_request_error", code=400)
    return 500, error_body("the engine failed; the server's log says more", kind="server_error", code=500)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    status, body = error_of(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(body, status, headers=headers)
