"""Reads request bodies within what they may take: bytes each, bytes of all together, time, and large ones at once.

A body counts until the block that asked for it is left, so what waits for a thread or the worker counts too. Called by
bulk.py, whose worker process imports this: aiohttp is imported where it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import Overloaded
from decoded.api.contract import ApiSettings
from decoded.api.errors import RequestRefused

if TYPE_CHECKING:
    from aiohttp import web

_RETRY_AFTER_S = 5.0


@dataclass(slots=True)
class _Held:
    """What one body counts for."""

    num_bytes: int = 0
    is_bulk: bool = False


class BodyReader:
    """Counts the bodies that are in memory."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._num_bulk = 0
        self.num_bytes = 0
        """Bytes of all bodies that are being read or prepared."""

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body of a request, held while the block runs.

        Raises:
            RequestRefused: it is too large, too slow or broken.
            Overloaded: too many large ones, or too many bytes, are held already.
        """
        held = _Held()
        try:
            yield await self._read(request, held)
        finally:
            self.num_bytes -= held.num_bytes
            self._num_bulk -= held.is_bulk

    async def _read(self, request: web.Request, held: _Held) -> bytes:
        from aiohttp import http_exceptions
        from aiohttp.web import RequestPayloadError

        settings, loop = self._settings, asyncio.get_running_loop()
        end = loop.time() + settings.body_timeout_s
        if (request.content_length or 0) > settings.max_body_bytes:
            raise _too_large(settings)
        body = bytearray()
        try:
            async with asyncio.timeout_at(end) as timeout:
                while True:
                    timeout.reschedule(min(end, loop.time() + settings.body_stall_s))
                    data = await request.content.readany()
                    if not data:
                        break
                    if held.num_bytes + len(data) > settings.max_body_bytes:
                        raise _too_large(settings)
                    self._hold(held, len(data))
                    body += data
        except TimeoutError as error:
            limits = f"all of it within {settings.body_timeout_s:g} s, and no pause above {settings.body_stall_s:g} s"
            message = f"The body came too slowly: it must arrive with {limits}."
            raise RequestRefused(message, None, "body_timeout", 408) from error
        except (http_exceptions.HttpProcessingError, RequestPayloadError) as error:  # a broken chunk, for example
            message = f"The body cannot be read: {error}."
            raise RequestRefused(message, None, "invalid_body") from error
        return bytes(body)

    def _hold(self, held: _Held, num_bytes: int) -> None:
        """Count bytes that came. Raises Overloaded when that is more than may be held."""
        settings = self._settings
        if self.num_bytes + num_bytes > settings.max_total_body_bytes:
            raise Overloaded(
                f"{self.num_bytes} bytes of request bodies are in memory; at most {settings.max_total_body_bytes} are"
                " at a time.",
                gate="body_bytes",
                value=self.num_bytes,
                limit=settings.max_total_body_bytes,
                setting="http.max_total_body_bytes",
                retry_after_s=_RETRY_AFTER_S,
            )
        if not held.is_bulk and held.num_bytes + num_bytes > settings.bulk_body_bytes:
            if self._num_bulk >= settings.max_bulk_bodies:
                raise Overloaded(
                    f"{self._num_bulk} large request bodies are being read; at most {settings.max_bulk_bodies} are at"
                    " a time.",
                    gate="bulk_bodies",
                    value=self._num_bulk,
                    limit=settings.max_bulk_bodies,
                    setting="http.max_bulk_bodies",
                    retry_after_s=_RETRY_AFTER_S,
                )
            held.is_bulk = True
            self._num_bulk += 1
        held.num_bytes += num_bytes
        self.num_bytes += num_bytes


def _too_large(settings: ApiSettings) -> RequestRefused:
    message = f"The body is larger than {settings.max_body_bytes} bytes (http.max_body_bytes)."
    return RequestRefused(message, None, "body_too_large", 413)
