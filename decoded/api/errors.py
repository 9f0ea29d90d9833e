"""Errors as OpenAI clients expect them: one JSON shape, a status, and Retry-After where coming back later helps.

The only place that maps the product's error tree to HTTP. Knows neither request nor HTTP server. Called by the app, the
stream writer and the bulk worker.
"""

from __future__ import annotations

import math
from typing import Any

from common.errors import Draining, InvalidRequest, Overloaded, PdError, PeerError


class RequestRefused(InvalidRequest):
    """A client error with OpenAI's machine-readable `code` and, where 400 is not it, its own HTTP status."""

    def __init__(self, message: str, param: str | None = None, api_code: str | None = None, status: int = 400) -> None:
        super().__init__(message, param, api_code)
        self.status = status


def http_status(error: PdError) -> int:
    """The HTTP status of an error; retryable failures that reach the client are 503."""
    if isinstance(error, (RequestRefused, Overloaded)):
        return error.status
    return 503 if error.is_retryable and error.http_status == 500 else error.http_status


def error_body(error: PdError) -> dict[str, Any]:
    """`{"error": {...}}` for a response or an SSE event."""
    status = http_status(error)
    detail: dict[str, Any] = {
        "message": str(error) or type(error).__name__,
        "type": _error_type(status),
        "param": getattr(error, "param", None),
        "code": error.api_code if isinstance(error, InvalidRequest) else error.code,
    }
    if isinstance(error, Overloaded):
        detail.update(gate=error.gate, value=error.value, limit=error.limit, setting=error.setting)
    return {"error": detail}


def error_headers(error: PdError) -> dict[str, str]:
    """The headers that go with an error: Retry-After, or how to authenticate."""
    status = http_status(error)
    headers = {}
    retry_after_s = _retry_after_s(error, status)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def _retry_after_s(error: PdError, status: int) -> float | None:
    if isinstance(error, (Overloaded, Draining, PeerError)) and error.retry_after_s is not None:
        return error.retry_after_s
    return 1.0 if status in (429, 503) else None


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status >= 500:
        return "server_error"
    return "authentication_error" if status == 401 else "invalid_request_error"
