"""The HTTP server of both daemons: aiohttp's, held to limits and with errors in JSON.

Connections are capped, and none takes one of the last file descriptors, which control socket and links need. A full
server closes the connection that is idle for longest; only when all are busy it answers 503. Bodies are never inflated
here. Knows no route. The applications build a Guard, the services run what `GuardedRunner` makes of both.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge

from common.logs import Damper
from common.metrics import help_text

HEAD_TIMEOUT_S = 15.0
IDLE_TIMEOUT_S = 75.0  # longer than the 60 s after which common proxies give up an idle connection
LINGER_S = 2.0
_WRITE_TIMEOUT_S = 300
_MAX_RESERVE = 256
_MAX_PIPELINED = 4
WATCH_S = 1.0
_CODES = {404: "not_found", 405: "method_not_allowed", 417: "expectation_failed", 500: "internal"}
_TOLD = {
    "head": "HTTP connections without a request were closed",
    "idle": "no room for another HTTP connection: the one that was idle for longest was closed",
    "connections": "an HTTP connection was refused: all of http.max_connections are busy",
    "descriptors": "an HTTP connection was refused: the last file descriptors are for links and control",
    "exhausted": "no file descriptor is left: connections of every kind are lost until one is closed",
}

log = logging.getLogger(__name__)


def descriptor_limit() -> int:
    """File descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def descriptor_reserve(limit: int) -> int:
    """How many of `limit` HTTP leaves alone."""
    return min(_MAX_RESERVE, limit // 4)


def num_descriptors() -> int:
    """File descriptors this process has open."""
    folder = Path("/proc/self/fd")
    # The size is their number since Linux 6.2 and 0 before.
    return folder.stat().st_size or sum(1 for _ in folder.iterdir()) - 1


def error_response(status: int, message: str, code: str | None, headers: dict[str, str] | None = None) -> web.Response:
    """A refusal in the form OpenAI's API has."""
    headers = {"Server": "prfaas", **(headers or {})}  # no application adds it to what is refused before its routes
    return web.Response(body=_error_body(status, message, code), status=status, headers=headers, content_type=_JSON)


class Guard:
    """The limits of one HTTP server, what they did, and the metrics that tell of it."""

    def __init__(
        self,
        registry: CollectorRegistry,
        max_connections: int,
        *,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        self.max_connections = self.num_for_connections = max_connections
        self.head_timeout_s, self.idle_timeout_s = head_timeout_s, idle_timeout_s
        self.connections = Gauge(
            "prfaas_http_connections",
            help_text("Open HTTP connections", "connections", "the current value"),
            registry=registry,
        )
        self._closed = Counter(
            "prfaas_http_connections_closed_total",
            help_text(
                "HTTP connections closed for want of a request (head), to make room (idle), or refused because all"
                " were busy (connections) or file descriptors ran short (descriptors)",
                "connections",
                "one connection",
            ),
            ["reason"],
            registry=registry,
        )
        self.malformed = Counter(
            "prfaas_http_malformed_total",
            help_text("Requests that were no proper HTTP or asked what HTTP servers may decline", "requests", "one"),
            registry=registry,
        )
        self._exhausted = Counter(
            "prfaas_no_descriptor_seconds_total",
            help_text("Seconds in which no file descriptor was left for new connections", "seconds", "one look"),
            registry=registry,
        )
        self._damper = Damper()
        for reason in ("head", "idle", "connections", "descriptors"):
            self._closed.labels(reason)

    def count_closed(self, reason: str) -> None:
        """A connection was closed or refused; the log hears of it at most once a minute."""
        self._closed.labels(reason).inc()
        self._tell(reason, logging.INFO if reason == "head" else logging.WARNING)

    def look_at_descriptors(self, num_open: int) -> None:
        """See how many are left for connections, of which there are `num_open`, and whether any is left at all.

        Without this nobody would know: uvloop drops connections without a word when there is none.
        """
        limit = descriptor_limit()
        try:
            self.num_for_connections = limit - descriptor_reserve(limit) - (num_descriptors() - num_open)
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._exhausted.inc(WATCH_S)
                self._tell("exhausted", logging.ERROR)

    def lacks(self, num_open: int) -> str:
        """What there is too little of for one more connection, "" for nothing."""
        if num_open >= self.max_connections:
            return "connections"
        return "descriptors" if num_open >= self.num_for_connections else ""

    def _tell(self, reason: str, level: int) -> None:
        num_held = self._damper.admit(reason)
        if num_held is not None:
            extra = {"max_connections": self.max_connections, "num_more_like_it": num_held or None}
            log.log(level, _TOLD[reason], extra=extra)


GUARD = web.AppKey("guard", Guard)


class GuardedRunner(web.AppRunner):
    """Runs an application within the limits of its `app[GUARD]`.

    Args:
        linger_s: how long the rest of a refused body is read and dropped, so that its sender sees the answer.
    """

    def __init__(
        self,
        app: web.Application,
        *,
        handler_cancellation: bool = True,
        shutdown_timeout: float = 1.0,
        linger_s: float = LINGER_S,
    ) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=shutdown_timeout)
        self._guard = app[GUARD]
        self._options: dict[str, Any] = {
            "handler_cancellation": handler_cancellation,
            "access_log": None,
            "auto_decompress": False,  # a few KB that inflate to gigabytes would stop the event loop
            "keepalive_timeout": self._guard.idle_timeout_s,
            "lingering_time": linger_s,
        }
        self._watch: asyncio.TimerHandle | None = None

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        server = _Server(plain, self._guard, self._options)
        self._look_at_descriptors(server)
        if self._guard.max_connections > (allowed := self._guard.num_for_connections):
            extra = {"max_connections": self._guard.max_connections, "allowed": allowed, "limit": descriptor_limit()}
            log.warning("http.max_connections is more than the limit of file descriptors allows", extra=extra)
        return server

    async def _cleanup_server(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await super()._cleanup_server()

    def _look_at_descriptors(self, server: _Server) -> None:
        self._guard.look_at_descriptors(server.num_open)
        self._watch = asyncio.get_running_loop().call_later(WATCH_S, self._look_at_descriptors, server)


class _Server(web.Server):
    """aiohttp's server, which here knows which of its connections are idle."""

    def __init__(self, plain: web.Server, guard: Guard, options: dict[str, Any]) -> None:
        super().__init__(self._serve, request_factory=self._begin, handler_cancellation=options["handler_cancellation"])
        self.guard = guard
        self._plain_handler, self._plain_factory = plain.request_handler, plain.request_factory
        self._options = {k: v for k, v in options.items() if k != "handler_cancellation"}
        self._open: set[web.RequestHandler] = set()
        self._idle: dict[web.RequestHandler, asyncio.TimerHandle | None] = {}  # longest first; a timer before the head

    @property
    def num_open(self) -> int:
        """Connections that are neither closed nor about to be."""
        return len(self._open)

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._options)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        lacks = self.guard.lacks(self.num_open)
        if lacks and not self._close_idle():
            self.guard.count_closed(lacks)
            transport.write(_FULL)
            handler.force_close()
            return
        peer = transport.get_extra_info("socket")
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _WRITE_TIMEOUT_S * 1000)
        self._open.add(handler)
        self.guard.connections.set(self.num_open)
        self._idle[handler] = self._loop.call_later(self.guard.head_timeout_s, self._no_head, handler)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._forget(handler)

    def _close_idle(self) -> bool:
        """Close the one that is idle for longest; one that has to send its answer yet is not."""
        for handler in self._idle:
            if handler.transport is None or not handler.transport.get_write_buffer_size():
                self.guard.count_closed("idle")
                self._forget(handler)
                handler.force_close()
                return True
        return False

    def _no_head(self, handler: web.RequestHandler) -> None:
        self.guard.count_closed("head")
        self._forget(handler)
        handler.force_close()

    def _forget(self, handler: web.RequestHandler) -> None:
        self._busy(handler)
        self._open.discard(handler)
        self.guard.connections.set(self.num_open)

    def _busy(self, handler: web.RequestHandler) -> None:
        timer = self._idle.pop(handler, None)
        if timer is not None:
            timer.cancel()

    def _begin(self, message: Any, payload: Any, protocol: web.RequestHandler, *rest: Any) -> web.BaseRequest:
        self._busy(protocol)
        return self._plain_factory(message, payload, protocol, *rest)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._plain_handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            if error.status == 417:  # raised before any middleware runs
                self.guard.malformed.inc()
            headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            return error_response(error.status, error.text or error.reason, _CODES.get(error.status), headers)
        finally:
            if request.protocol in self._open:
                self._idle[request.protocol] = None


class _Connection(web.RequestHandler):
    """One connection, whose failures are answered in JSON and logged without a client being able to flood the log."""

    __slots__ = ()

    def __init__(self, manager: _Server, **options: Any) -> None:
        super().__init__(manager, **options)
        # Each request that waits behind another may hold its share of unread body.
        self._max_msg_queue_size, self._msg_queue_resume_size = _MAX_PIPELINED, _MAX_PIPELINED // 2

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to malformed HTTP (400) or to what no application foresaw; the connection closes after it."""
        has_begun = request.writer.output_size > 0
        if isinstance(exc, ConnectionError) and (has_begun or request.transport is None):
            raise exc  # the client left, or an application that has begun its answer gave up
        if status == 400:
            if isinstance(self._manager, _Server):
                self._manager.guard.malformed.inc()
            text = " ".join((message or "").split())[:200] or "The request is no proper HTTP."
            log.debug("malformed HTTP", extra={"from": request.remote, "why": text})
        else:
            text = "The request failed unexpectedly."
            log.error("an HTTP request failed unexpectedly", exc_info=exc, extra={"path": request.path[:200]})
        if has_begun:
            raise ConnectionError("the answer has begun; it cannot become an error")
        response = error_response(status, text, "invalid_http" if status == 400 else _CODES.get(status))
        response.force_close()
        return response


_JSON = "application/json"


def _error_body(status: int, message: str, code: str | None) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    detail = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": detail}, separators=(",", ":")).encode()


def _full() -> bytes:
    body = _error_body(503, "This server has as many connections as it can serve.", "connections")
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {_JSON}\r\nContent-Length: {len(body)}\r\n"
    return (head + "Retry-After: 1\r\nConnection: close\r\nServer: prfaas\r\n\r\n").encode() + body


_FULL = _full()
