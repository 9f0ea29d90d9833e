"""prefilld over HTTP, read-only: health, metrics, version, status. No request of a user ever comes in here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from common.control import http_routes, json_response, name_server
from common.daemon import Handler
from common.errors import Draining
from common.http_server import GUARD, Guard, GuardedRunner, error_response
from common.metrics import CONTENT_TYPE


def make_app(
    *,
    readiness: Callable[[], tuple[bool, str]],
    metrics: Callable[[], bytes],
    handlers: Mapping[str, Handler],
    guard: Guard,
) -> web.Application:
    """`handlers` are the control verbs; the read-only ones are served under /control."""

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        is_ready, reason = readiness()
        body = {"is_ready": is_ready, "why": reason}
        headers = {} if is_ready else {"Retry-After": f"{Draining.retry_after_s:.0f}"}
        return json_response(body, status=200 if is_ready else 503, headers=headers)

    async def metrics_text(_: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def version(_: web.Request) -> web.Response:
        return json_response(await handlers["version"]({}))

    app = web.Application(middlewares=[_answer_errors])
    app[GUARD] = guard
    name_server(app)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics_text)
    app.router.add_get("/version", version)
    app.router.add_routes(http_routes(handlers))
    return app


@web.middleware
async def _answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What is not there, and any body at all, in the JSON that decoded answers with too."""
    if request.body_exists:
        refusal = error_response(413, "This server takes no request bodies.", "body_too_large")
        refusal.force_close()
        return refusal
    try:
        return await handler(request)
    except web.HTTPClientError as error:
        is_missing = error.status in (404, 405)
        message = f"There is no {request.method} {request.path[:200]}." if is_missing else error.reason
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status)
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return error_response(error.status, message, code, allow)


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner that reads no body, and does not wait for idle scrapers when the daemon stops."""
    return GuardedRunner(app, linger_s=0)
