"""What the HTTP API needs from the rest of decoded: its settings and the dispatcher it hands requests to.

Plain data and Protocols; knows neither aiohttp nor how requests are routed. Used by every module of this package and
by the daemon that builds the application.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import PdError
from common.layout import ModelInfo
from common.request import PromptLogprobs, Request, RequestReport, TokenOutput


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """What the operator can set about the API.

    `api_keys` are lines as read_api_key takes them; none means no authentication. `max_prompts` bounds prompts x
    choices of one HTTP request. `bulk_body_bytes` is the body size from which parsing and tokenising leave this
    process; `max_total_body_bytes` bounds all bodies in memory together, `body_stall_s` the wait for the next byte of
    one. `warning`, when there is one, is a header of every answer.
    """

    default_max_tokens: int = 2048
    max_body_bytes: int = 32 << 20
    sse_comment_s: float = 2.0
    allow_route_override: bool = False
    api_keys: tuple[str, ...] = ()
    max_prompts: int = 128
    bulk_body_bytes: int = 512 << 10
    max_bulk_bodies: int = 8
    max_total_body_bytes: int = 256 << 20
    max_connections: int = 512
    body_timeout_s: float = 120.0
    body_stall_s: float = 20.0
    warning: str = ""


def read_api_key(line: str) -> tuple[str, str]:
    """Key and class ("" for none) of a line of http.api_key_file: "KEY" or "KEY CLASS"."""
    key, _, service_class = line.strip().partition(" ")
    return key, service_class.strip()


class ActiveRequest(Protocol):
    """A submitted request. Iterate it once; `report` is complete when the iteration has ended."""

    report: RequestReport

    def __aiter__(self) -> AsyncIterator[TokenOutput | PromptLogprobs]:
        """Outputs of all choices in the order they were sampled. Raises PdError subclasses on failure."""

    def cancel(self, choice: int | None = None) -> None:
        """Stop one choice, or everything (the client left). Idempotent."""


class Dispatcher(Protocol):
    """Admits, routes and runs requests."""

    @property
    def info(self) -> ModelInfo: ...

    def submit(self, request: Request, *, arrived_at: float) -> ActiveRequest:
        """Admit or queue. `arrived_at` is the monotonic instant at which the HTTP request arrived.

        Raises:
            Overloaded, Draining: refused now.
            InvalidRequest: it can never be served.
        """

    def count_refused(self, error: PdError) -> None:
        """An HTTP request ended with that error before any of its prompts was submitted."""

    def readiness(self) -> tuple[bool, str]:
        """Whether new requests can be served, and why not."""

    def version(self) -> dict[str, Any]:
        """What /version answers."""
