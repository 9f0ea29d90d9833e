"""The control API: JSON verbs on a Unix socket (mode 0600), read-only ones also over HTTP.

Knows no verb's meaning: handlers are coroutines that take params and return JSON data. A lock file next to the socket
decides who owns it, so a second daemon is refused and a dead one's socket is replaced without a race. Framing is
control_client's. Called by daemon.py; the daemons mount `http_routes` on their HTTP servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import resource
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.control_client import HEADER, MAX_REQUEST_BYTES, decode_body, encode_frame, frame_length
from common.errors import ConfigError, ControlError, PdError, StartupError

if TYPE_CHECKING:
    from aiohttp import web

Handler = Callable[[dict[str, Any]], Awaitable[Any]]
READ_ONLY = ("status", "peers", "requests", "cache", "version")
# They take long and change nothing that has to be finished: given up when whoever asked leaves.
LONG = ("link_bench", "profile")
LEFT_POLL_S = 0.2

log = logging.getLogger(__name__)


class ControlServer:
    """Serves verbs on a Unix socket. `dispatch` is called for every request and raises PdError to refuse."""

    def __init__(self, path: Path, dispatch: Callable[[str, dict[str, Any]], Awaitable[Any]]) -> None:
        self.path = path
        self._dispatch = dispatch
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock_fd = -1

    async def start(self) -> None:
        """Take the socket and listen.

        Raises:
            StartupError: another daemon has it, or the path cannot be used.
        """
        self._lock_fd = _take_lock(self.path)
        try:
            listener = _bind(self.path)
        except StartupError:
            self._release_lock()
            raise
        self._server = await asyncio.start_unix_server(self._connected, sock=listener)

    async def close(self) -> None:
        """Stop listening, end open connections, remove the socket."""
        if self._server is None:
            return
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._release_lock()

    def _release_lock(self) -> None:
        # The lock file stays: removing it would let two daemons lock two different files of the same name.
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # The client left, or we close: there is nobody to tell.
        finally:
            writer.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a control verb failed; its connection was closed", exc_info=error)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read, serve and answer one request; False when the connection is of no further use."""
        header = await reader.read(HEADER.size)
        if not header:
            return False
        try:
            header += await reader.readexactly(HEADER.size - len(header))
            request = decode_body(await reader.readexactly(frame_length(header, MAX_REQUEST_BYTES)))
        except ControlError as error:
            writer.write(encode_frame(_failure(error)))
            return False
        writer.write(encode_frame(await self._reply(request, reader)))
        await writer.drain()
        return True

    async def _reply(self, request: dict[str, Any], reader: asyncio.StreamReader) -> dict[str, Any]:
        verb, params = request.get("verb"), request.get("params", {})
        if not isinstance(verb, str) or not isinstance(params, dict):
            return _failure(ControlError('a request is {"verb": text, "params": object}'))
        try:
            work = self._dispatch(verb, params)
            return {"ok": True, "data": await (_while_there(reader, work) if verb in LONG else work)}
        except PdError as error:
            return _failure(error)


async def _while_there(reader: asyncio.StreamReader, work: Awaitable[Any]) -> Any:
    """What a verb answers; it is cancelled when the client closes its end, or we are cancelled.

    Raises:
        ConnectionResetError: the client has left.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if reader.at_eof():
                raise ConnectionResetError("the client left before its verb was done")
            await asyncio.wait((task,), timeout=LEFT_POLL_S)
        return task.result()
    finally:
        if task.cancel():
            await asyncio.wait((task,))


def _failure(error: PdError) -> dict[str, Any]:
    failure: dict[str, Any] = {"code": error.code, "message": str(error)}
    if isinstance(error, ConfigError):
        failure["problems"], failure["advice"] = error.problems, error.advice
    return {"ok": False, "error": failure}


def _take_lock(path: Path) -> int:
    """Make the directory, lock `<socket>.lock` for our life time and write our pid; returns its descriptor."""
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid not in (0, os.geteuid()):
            raise StartupError(f"control socket {path}: {path.parent} belongs to another user, who could replace it")
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartupError(f"control socket {path}: cannot create {lock}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise StartupError(f"control socket {path} belongs to a running daemon (pid {owner or 'unknown'})") from error
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def _bind(path: Path) -> socket.socket:
    """A listening socket that only our user (and root) may connect to; a dead daemon's one is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if path.is_socket():
            path.unlink()
        elif stat_mode := _mode_of(path):
            raise StartupError(f"control socket {path}: a {stat.filemode(stat_mode)} file is in the way, not a socket")
        # From the first instant on: chmod after bind would leave a gap.
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise StartupError(f"control socket {path}: {error.strerror or error}") from error
    except StartupError:
        listener.close()
        raise
    return listener


def _mode_of(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def json_response(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Compact JSON, as everything that both daemons answer over HTTP. Values JSON does not know become strings."""
    from aiohttp import web

    body = json.dumps(data, separators=(",", ":"), ensure_ascii=False, default=str).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def http_routes(handlers: Mapping[str, Handler], prefix: str = "/control") -> list[web.RouteDef]:
    """GET routes of the read-only verbs (`{prefix}/status` ...), for an aiohttp application."""
    from aiohttp import web

    def route(verb: str, handler: Handler) -> web.RouteDef:
        async def get(_: web.Request) -> web.Response:
            return json_response(await handler({}))

        return web.get(f"{prefix}/{verb}", get)

    return [route(verb, handlers[verb]) for verb in READ_ONLY if verb in handlers]


def name_server(app: web.Application) -> None:
    """Have an application's responses say `Server: prfaas`, and nothing of what it is made of."""

    async def name(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "prfaas"

    app.on_response_prepare.append(name)


async def bind_http(runner: web.AppRunner, host: str, port: int, setting: str) -> int:
    """Set an application's runner up and listen; returns the bound port. Raises StartupError naming the setting."""
    from aiohttp import web

    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise StartupError(f"cannot bind {host}:{port} ({setting}): {error.strerror or error}") from error
    if not runner.addresses:
        # uvloop hands out duplicates of its sockets, and none when no descriptor is left for them.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        await runner.cleanup()
        raise StartupError(f"cannot serve {host}:{port} ({setting}): {soft} file descriptors (ulimit -n) are too few")
    return int(runner.addresses[0][1])
