"""The handler of both generating endpoints: body in, requests submitted, answer out whole or streamed.

Measures nothing but the instant of arrival; the dispatcher stamps the rest. Called by app.py's routes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from common.request import Request, Route
from common.text.tokenizer import Tokenizer
from decoded.api.auth import KEY_CLASS, REQUEST_ID, TENANT, read_request_id
from decoded.api.bulk import Preparer
from decoded.api.chat import ChatShape
from decoded.api.choices import Choice
from decoded.api.completions import CompletionShape
from decoded.api.contract import ActiveRequest, ApiSettings, Dispatcher
from decoded.api.errors import RequestRefused
from decoded.api.fanout import Fanout
from decoded.api.prepare import Prepared
from decoded.api.prompts import resolve_sampling
from decoded.api.schema import Kind, Limits
from decoded.api.shapes import Head, Shape, prfaas_object
from decoded.api.stream import ClientWatch, EventStream
from decoded.api.turns import TurnMemory

SUBMITTED = web.RequestKey("submitted", bool)
"""Set once the dispatcher has the prompts: from then on it counts what becomes of them."""
_MAX_INLINE_ENTRIES = 256
MIN_DEADLINE_S, MAX_DEADLINE_S = 0.001, 86400.0
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{0,12})?")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the headers say about one HTTP request."""

    request_id: str
    arrived_at: float
    tenant: str
    service_class: str
    deadline_s: float | None
    forced_route: Route | None
    wants_timing: bool


class Generator:
    """Serves /v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        settings: ApiSettings,
        preparer: Preparer,
        turns: TurnMemory,
    ) -> None:
        self._dispatcher, self._tokenizer, self._preparer = dispatcher, tokenizer, preparer
        self._settings, self._turns = settings, turns
        self._in_flight: set[str] = set()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._serve(request, "completions")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._serve(request, "chat")

    def limits(self) -> Limits:
        """The model's and the operator's limits."""
        info, settings = self._dispatcher.info, self._settings
        return Limits(
            model=info.name,
            vocab_size=info.vocab_size,
            max_context=info.max_context,
            default_max_tokens=settings.default_max_tokens,
            max_prompts=settings.max_prompts,
        )

    async def _serve(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        asked = self._read_headers(request)
        limits = self.limits()
        prepared = await self._preparer.prepare(kind, request, limits)
        requests = self._requests(asked, prepared, limits)
        ids = {r.request_id for r in requests}
        self._in_flight |= ids
        request[SUBMITTED] = True
        try:
            active = self._submit(requests, asked.arrived_at)
            async with Fanout(prepared, active, self._tokenizer, self._follow(asked, prepared)) as fanout:
                return await self._answer(request, asked, fanout)
        finally:
            self._in_flight -= ids

    def _follow(self, asked: Asked, prepared: Prepared) -> Callable[[Choice], None] | None:
        """What a chat was submitted for is remembered when it has come to its end."""
        turn = prepared.turn
        if turn is None:
            return None
        self._turns.asked(asked.tenant, turn, asked.request_id)
        return lambda choice: self._turns.answered(asked.tenant, turn, choice.tokens)

    async def _answer(self, request: web.Request, asked: Asked, fanout: Fanout) -> web.StreamResponse:
        params = fanout.prepared.params
        head = Head(asked.request_id, int(time.time()), self._dispatcher.info.name, params.include_usage)
        shape: Shape = (ChatShape if params.kind == "chat" else CompletionShape)(head, self._tokenizer)
        if params.stream:
            stream = EventStream(
                request, fanout, shape, comment_s=self._settings.sse_comment_s, wants_timing=asked.wants_timing,
                headers={"X-Request-Id": asked.request_id},
            )  # fmt: skip
            return await stream.run()
        return await self._whole(request, asked, fanout, shape)

    async def _whole(self, request: web.Request, asked: Asked, fanout: Fanout, shape: Shape) -> web.Response:
        watch = ClientWatch(request, fanout)
        try:
            while not fanout.is_done:
                await fanout.wait_changed()
                if watch.is_gone:
                    return web.Response(status=499)
        finally:
            watch.close()
        fanout.raise_for_bug()
        if fanout.error is not None:
            raise fanout.error
        reports = prfaas_object(fanout.reports, fanout.prepared.is_list) if asked.wants_timing else None
        if fanout.num_entries > _MAX_INLINE_ENTRIES:
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self._preparer.threads, shape.whole, fanout, reports)
        else:
            body = shape.whole(fanout, reports)
        return web.Response(body=body, content_type="application/json")

    def _read_headers(self, request: web.Request) -> Asked:
        arrived_at = time.monotonic()
        return Asked(
            request_id=request[REQUEST_ID],
            arrived_at=arrived_at,
            tenant=request[TENANT],
            service_class=_service_class(request.headers.get("X-Prfaas-Class"), request[KEY_CLASS]),
            deadline_s=_deadline_s(request.headers.get("X-Prfaas-Deadline")),
            forced_route=self._forced_route(request.headers.get("X-Prfaas-Route")),
            wants_timing=_switch("X-Prfaas-Timing", request.headers.get("X-Prfaas-Timing")),
        )

    def _forced_route(self, value: str | None) -> Route | None:
        if value is None:
            return None
        if not self._settings.allow_route_override:
            raise RequestRefused(
                "X-Prfaas-Route is only accepted when the server is configured with http.allow_route_override = true.",
                "X-Prfaas-Route",
                "unsupported_parameter",
            )
        if value == "local":
            return "local"
        if value == "remote":
            return "remote"
        raise RequestRefused(
            f"X-Prfaas-Route is {value[:80]!r}; it must be local or remote.", "X-Prfaas-Route", "invalid_value"
        )

    def _requests(self, asked: Asked, prepared: Prepared, limits: Limits) -> list[Request]:
        params, base = prepared.params, asked.request_id
        while base in self._in_flight or f"{base}-0" in self._in_flight:  # a client's id may repeat, ours must not
            base = f"{asked.request_id}.{read_request_id(None)[:6]}"
        many = len(prepared.prompts) > 1
        return [
            Request(
                request_id=f"{base}-{number}" if many else base,
                prompt_tokens=prompt.tokens,
                sampling=resolve_sampling(params, len(prompt.tokens), limits),
                num_choices=params.num_choices,
                prompt_logprobs=params.logprobs if params.echo else None,
                forced_route=asked.forced_route,
                deadline_s=asked.deadline_s,
                tenant=asked.tenant,
                service_class=asked.service_class,
            )
            for number, prompt in enumerate(prepared.prompts)
        ]

    def _submit(self, requests: list[Request], arrived_at: float) -> list[ActiveRequest]:
        """All or none: when one prompt of a list is refused, those before it are cancelled."""
        active: list[ActiveRequest] = []
        try:
            for request in requests:
                active.append(self._dispatcher.submit(request, arrived_at=arrived_at))
        except BaseException:
            for earlier in active:
                earlier.cancel()
            raise
        return active


def _service_class(value: str | None, key_class: str) -> str:
    """The class that the header names, or that of the API key, which no header overrides; "" where neither says."""
    if value == "":
        raise RequestRefused("X-Prfaas-Class is empty; leave it out, or name a class.", "X-Prfaas-Class")
    if value and key_class and value != key_class:
        raise RequestRefused(
            f"X-Prfaas-Class is {value[:80]!r}; the requests of this API key are of class {key_class!r}.",
            "X-Prfaas-Class",
            "class_not_allowed",
            403,
        )
    return key_class or value or ""


def _deadline_s(value: str | None) -> float | None:
    if value is None:
        return None
    if _NUMBER.fullmatch(value) and MIN_DEADLINE_S <= (seconds := float(value)) <= MAX_DEADLINE_S:
        return seconds
    raise RequestRefused(
        f"X-Prfaas-Deadline is {value[:80]!r}; it must be a number of seconds from {MIN_DEADLINE_S:g} to"
        f" {MAX_DEADLINE_S:g}.",
        "X-Prfaas-Deadline",
        "invalid_value",
    )


def _switch(name: str, value: str | None) -> bool:
    if value in (None, "", "0"):
        return False
    if value == "1":
        return True
    raise RequestRefused(f"{name} is {str(value)[:80]!r}; it must be 0 or 1.", name, "invalid_value")
