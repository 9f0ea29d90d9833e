"""prefilld over HTTP, read-only: health, metrics, version, status. No request of a user ever comes in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from common.errors import StartupError


def make_app(
    *, readiness: Callable[[], tuple[bool, str]], metrics: Callable[[], bytes], facts: Callable[[str], Any]
) -> web.Application:
    """`facts(verb)` answers "version", "status" and "peers"."""

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        is_ready, why = readiness()
        return web.Response(text=why + "\n", status=200 if is_ready else 503)

    async def metrics_text(_: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def fact(request: web.Request) -> web.Response:
        return web.json_response(facts(request.path.strip("/")))

    app = web.Application()
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics_text)
    for verb in ("version", "status", "peers"):
        app.router.add_get(f"/{verb}", fact)
    return app


async def start_site(app: web.Application, host: str, port: int, setting: str) -> tuple[web.AppRunner, int]:
    """Bind; returns the runner and the bound port. Raises StartupError naming the setting."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as e:
        await runner.cleanup()
        raise StartupError(f"cannot bind {host}:{port} ({setting}): {e.strerror or e}") from e
    return runner, int(runner.addresses[0][1])
