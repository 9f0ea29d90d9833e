"""The HTTP application of decoded: routes, authentication, error answers, and the small read-only endpoints.

Built by the daemon with make_app and served through make_runner. Knows nothing of peers, engines or configuration
files: what it needs is in ApiSettings and behind the Dispatcher Protocol.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from common.control import name_server
from common.errors import Draining, PdError
from common.http_server import GUARD, Guard, GuardedRunner
from common.text.tokenizer import Tokenizer
from decoded.api.auth import KEY_CLASS, REQUEST_ID, TENANT, KeyRing, read_request_id
from decoded.api.bulk import Preparer
from decoded.api.contract import ApiSettings, Dispatcher
from decoded.api.errors import RequestRefused, error_body, error_headers, http_status
from decoded.api.generate import SUBMITTED, Generator
from decoded.api.shapes import dumps
from decoded.api.stream import SERVED
from decoded.api.turns import TurnMemory

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

KEY_RING = web.AppKey("key_ring", KeyRing)
OPEN_PATHS = frozenset({"/livez", "/readyz"})
GENERATING = ("/v1/completions", "/v1/chat/completions")
_CLIENT_LEFT = 499

log = logging.getLogger(__name__)


def make_app(
    dispatcher: Dispatcher, tokenizer: Tokenizer, settings: ApiSettings, registry: CollectorRegistry
) -> web.Application:
    """The application, ready for a runner. `registry` is what /metrics shows and where HTTP responses are counted."""
    counter = Counter(
        "prfaas_http_responses_total",
        "HTTP responses by route and status code; 499 when the client left first. One per request.",
        ["path", "status"],
        registry=registry,
    )
    keys = KeyRing(settings.api_keys)
    app = web.Application(
        client_max_size=settings.max_body_bytes,
        middlewares=[_count(counter), _answer_errors(settings, dispatcher), _identify(keys)],
    )
    app[KEY_RING] = keys
    app[GUARD] = Guard(registry, settings.max_connections)
    name_server(app)
    if settings.warning:
        app.on_response_prepare.append(_warn(settings.warning))
    preparer = Preparer(tokenizer, settings)
    app.on_cleanup.append(lambda _: preparer.close())
    generator = Generator(dispatcher, tokenizer, settings, preparer, _turn_memory(registry, preparer))
    pages = _Pages(dispatcher, registry, has_chat=tokenizer.has_chat_template)
    for path, handler in zip(GENERATING, (generator.completions, generator.chat), strict=True):
        app.router.add_post(path, handler)
    app.router.add_get("/v1/models", pages.models)
    app.router.add_get("/v1/models/{model:.+}", pages.model)
    app.router.add_get("/livez", pages.livez)
    app.router.add_get("/readyz", pages.readyz)
    app.router.add_get("/metrics", pages.metrics)
    app.router.add_get("/version", pages.version)
    return app


def _turn_memory(registry: CollectorRegistry, preparer: Preparer) -> TurnMemory:
    counter = Counter(
        "prfaas_template_continuations_total",
        "Chat requests that continue a conversation that was answered here, by whether their prompt begins with the"
        " tokens computed for it (same) or not (diverged: what is cached of it is of use in part). One per request.",
        ["result"],
        registry=registry,
    )
    for result in ("same", "diverged"):
        counter.labels(result)
    return TurnMemory(counter, preparer.threads)


def make_runner(app: web.Application, **options: Any) -> web.AppRunner:
    """A runner for the application: a vanished client cancels its handler, requests are not logged line by line."""
    return GuardedRunner(app, **options)


class _Pages:
    """The read-only endpoints."""

    def __init__(self, dispatcher: Dispatcher, registry: CollectorRegistry, *, has_chat: bool) -> None:
        self._dispatcher, self._registry, self._has_chat = dispatcher, registry, has_chat
        self._created = int(time.time())

    async def models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._dispatcher.info.name:
            raise RequestRefused(f"The model {name[:200]!r} does not exist.", "model", "model_not_found", 404)
        return _json(self._model())

    async def livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, _: web.Request) -> web.Response:
        is_ready, reason = self._dispatcher.readiness()
        body = {"is_ready": is_ready, "why": reason}
        headers = error_headers(Draining(reason))  # comes back as late as the API says
        return _json(body) if is_ready else _json(body, status=503, headers=headers)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def version(self, _: web.Request) -> web.Response:
        return _json(self._dispatcher.version())

    def _model(self) -> dict[str, Any]:
        info = self._dispatcher.info
        return {
            "id": info.name,
            "object": "model",
            "created": self._created,
            "owned_by": "prfaas",
            "max_model_len": info.max_context,
            "chat": self._has_chat,
        }


def _count(counter: Counter) -> Any:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = _CLIENT_LEFT
        try:
            response = await handler(request)
            status = response.status
            return response
        except Exception:
            status = 500
            raise
        finally:
            # Clients close as soon as they have read the last event, which may cancel us a moment before our end.
            counter.labels(_route(request), str(200 if request.get(SERVED) else status)).inc()

    return middleware


def _answer_errors(settings: ApiSettings, dispatcher: Dispatcher) -> Any:
    """Every refusal and failure in OpenAI's JSON, with the request id."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except PdError as error:
            is_prompt = _route(request) in GENERATING and http_status(error) != 401
            if is_prompt and not request.get(SUBMITTED):
                dispatcher.count_refused(error)
            response = _error(error)
        except web.HTTPException as error:
            response = _error(_from_aiohttp(error, request, settings), error.headers.get("Allow"))
        except Exception as error:
            has_begun = request.writer.output_size > 0
            if isinstance(error, ConnectionError) and (has_begun or request.transport is None):
                raise  # the client left while it was answered
            bug = _log_bug(error, request)
            if has_begun:
                raise ConnectionError("the answer has begun; it cannot become an error") from error
            if _route(request) in GENERATING and not request.get(SUBMITTED):
                dispatcher.count_refused(bug)
            response = _error(bug)
        request_id = request.get(REQUEST_ID)
        if request_id and not response.prepared:
            response.headers["X-Request-Id"] = request_id
        return response

    return middleware


def _log_bug(error: Exception, request: web.Request) -> PdError:
    """What nobody foresaw goes to the log with its traceback, and to the client without."""
    request_id = request.get(REQUEST_ID)
    extra = {"request_id": request_id, "path": _route(request)}
    log.error("an HTTP request failed unexpectedly", exc_info=error, extra=extra)
    return PdError("The request failed for a reason nobody foresaw; the server's log has it under the request id.")


def _warn(text: str) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def add(request: web.Request, response: web.StreamResponse) -> None:
        if _route(request) in GENERATING:
            response.headers["X-Prfaas-Warning"] = text

    return add


def _identify(keys: KeyRing) -> Any:
    """Deny by default: whatever is not an open path needs a key, unknown paths included."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            request[TENANT], request[KEY_CLASS] = keys.identify(request.headers.get("Authorization"))
            request[REQUEST_ID] = read_request_id(request.headers.get("X-Request-Id"))
        _refuse_encodings(request)
        return await handler(request)

    return middleware


def _refuse_encodings(request: web.Request) -> None:
    """Bodies come as they are: a few KB that inflate to gigabytes are an old way to stop a server."""
    named = ",".join(request.headers.getall("Content-Encoding", ()))
    if any(coding.strip().lower() not in ("", "identity") for coding in named.split(",")):
        raise RequestRefused(
            f"The content encoding is {named[:80]!r}; send the body as plain JSON, without one.",
            "Content-Encoding",
            "unsupported_content_encoding",
            415,
        )


def _from_aiohttp(error: web.HTTPException, request: web.Request, settings: ApiSettings) -> RequestRefused:
    if error.status == 413:
        message = f"The body is larger than {settings.max_body_bytes} bytes (http.max_body_bytes)."
        return RequestRefused(message, None, "body_too_large", 413)
    if error.status in (404, 405):
        message = f"There is no {request.method} {request.path[:200]}."
        return RequestRefused(message, None, "not_found" if error.status == 404 else "method_not_allowed", error.status)
    return RequestRefused(error.reason or "The request cannot be served.", None, None, error.status)


def _error(error: PdError, allow: str | None = None) -> web.Response:
    headers = error_headers(error) | ({"Allow": allow} if allow else {})
    return _json(error_body(error), status=http_status(error), headers=headers)


def _json(data: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=dumps(data), status=status, headers=headers, content_type="application/json")


def _route(request: web.Request) -> str:
    """The route's pattern: paths that clients invent must not become time series."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"
