"""The HTTP port while the model is loaded: it says so (503, Retry-After) instead of refusing connections.

The listening sockets are bound once and handed over to the real application, so no connection is lost between the two.
Knows no route but /livez. Used by decoded's service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from aiohttp import web
from prometheus_client import CollectorRegistry

from common.errors import StartupError
from common.http_server import GUARD, Guard, GuardedRunner, error_response

RETRY_AFTER_S = 5
_BACKLOG = 128


class LoadingPage:
    """Open it before the model is loaded; `hand_over` or `close` ends it."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._runner: web.AppRunner | None = None

    async def open(self, host: str, port: int, setting: str, max_connections: int) -> None:
        """Listen, and answer everything with 503. Raises StartupError naming the setting."""
        try:
            self._sockets = await _listen(host, port)
        except OSError as error:
            raise StartupError(f"cannot listen on {host}:{port} ({setting}): {error.strerror or error}") from error
        app = web.Application()
        app[GUARD] = Guard(CollectorRegistry(), max_connections)
        app.router.add_get("/livez", _livez)
        app.router.add_route("*", "/{path:.*}", _loading)
        self._runner = GuardedRunner(app)
        await self._runner.setup()
        for each in self._sockets:
            await web.SockSite(self._runner, each.dup(), backlog=_BACKLOG).start()

    async def hand_over(self, runner: web.AppRunner) -> int:
        """From now on this application answers on these sockets; returns the port."""
        await runner.setup()
        port = int(self._sockets[0].getsockname()[1])
        for each in self._sockets:
            await web.SockSite(runner, each, backlog=_BACKLOG).start()
        self._sockets = []
        await self.close()
        return port

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        for each in self._sockets:
            each.close()
        self._sockets = []


async def _listen(host: str, port: int) -> list[socket.socket]:
    """A bound, listening socket for each address of the host, all on one port. Raises OSError."""
    flags = socket.AI_PASSIVE | socket.AI_ADDRCONFIG
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    found: list[socket.socket] = []
    with contextlib.ExitStack() as on_error:
        for family, kind, proto, _, address in dict.fromkeys(infos):
            each = socket.socket(family, kind, proto)
            on_error.callback(each.close)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound_port = found[0].getsockname()[1] if found else port
            each.bind((address[0], bound_port, *address[2:]))
            each.listen(_BACKLOG)
            each.setblocking(False)
            os.set_inheritable(each.fileno(), False)
            found.append(each)
        on_error.pop_all()
    return found


async def _livez(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _loading(_: web.Request) -> web.Response:
    text = "This server is loading its model; try again in a moment."
    response = error_response(503, text, "loading", {"Retry-After": str(RETRY_AFTER_S)})
    response.force_close()
    return response
