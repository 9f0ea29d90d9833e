"""Writes a request's answer as server-sent events while it is being generated.

Headers leave with the first event, so a failure before that is still an ordinary HTTP error; after it, an error event
ends the stream without [DONE]. A silent stream gets comments. Writing waits for the client; meanwhile deltas gather.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from decoded.api.errors import error_body
from decoded.api.fanout import Fanout
from decoded.api.shapes import Shape, event, prfaas_object

COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
SERVED = web.RequestKey("served", bool)
"""Set once the last event was handed to the transport: a client that closes from then on has got its answer."""
_WATCH_S = 0.25
_MAX_ENTRIES = 256  # log probabilities in one event: more would hold up the other streams


class ClientWatch:
    """Wakes a fanout at intervals, so that its waiter can see a vanished client and long silences."""

    def __init__(self, request: web.Request, fanout: Fanout, interval_s: float = _WATCH_S) -> None:
        self._request, self._fanout, self._interval_s = request, fanout, interval_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s, self._wake)

    @property
    def is_gone(self) -> bool:
        """True when the client closed the connection."""
        transport = self._request.transport
        return transport is None or transport.is_closing()

    def close(self) -> None:
        """Stop waking."""
        self._timer.cancel()

    def _wake(self) -> None:
        self._fanout.changed.set()
        self._timer = self._loop.call_later(self._interval_s, self._wake)


class EventStream:
    """One streamed answer."""

    def __init__(
        self,
        request: web.Request,
        fanout: Fanout,
        shape: Shape,
        *,
        comment_s: float,
        wants_timing: bool,
        headers: dict[str, str],
    ) -> None:
        self._request, self._fanout, self._shape = request, fanout, shape
        self._comment_s, self._wants_timing = comment_s, wants_timing
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._opened: set[int] = set()
        self._watch = ClientWatch(request, fanout, min(_WATCH_S, comment_s / 4))

    async def run(self) -> web.StreamResponse:
        """Stream until the end, an error or the client's leaving.

        Raises:
            PdError: generation failed before anything was written.
        """
        try:
            while not await self._step():
                pass
        except ConnectionError:  # the client left while we wrote; leaving the fanout cancels its requests
            return self._response
        finally:
            self._watch.close()
        return self._response

    async def _step(self) -> bool:
        """Wait for news and write it; True at the end."""
        fanout = self._fanout
        await fanout.wait_changed()
        if self._watch.is_gone:
            return True
        if fanout.error is not None:
            if not self._response.prepared:
                raise fanout.error
            await self._write(event(error_body(fanout.error)))
            return True
        fanout.raise_for_bug()
        payload, is_end = self._events(fanout.is_done)
        if is_end:
            payload += self._ending()
        elif not payload and self._loop.time() - self._written_at >= self._comment_s:
            payload = COMMENT
        if is_end:
            await self._write_last(payload)
        elif payload:
            await self._write(payload)
        return is_end

    def _events(self, is_done: bool) -> tuple[bytes, bool]:
        """Everything that is ready, and whether that is the end.

        The very last finish reason waits until all reports are complete.
        """
        choices = self._fanout.choices
        with_finish = is_done or not self._fanout.is_sampled
        taken = [(c, c.take(with_finish=with_finish, max_entries=_MAX_ENTRIES)) for c in choices]
        is_left = self._fanout.num_entries > 0
        if is_left:
            self._fanout.changed.set()
        is_end = is_done and not is_left
        ready = [(choice, delta) for choice, delta in taken if delta is not None]
        parts: list[bytes] = []
        for number, (choice, delta) in enumerate(ready, start=1):
            if choice.index not in self._opened:
                self._opened.add(choice.index)
                parts.append(self._shape.opening(choice))
            has_prfaas = is_end and number == len(ready) and not self._has_tail
            parts.append(self._shape.chunk(choice, delta, self._prfaas() if has_prfaas else None))
        return b"".join(parts), is_end

    def _ending(self) -> bytes:
        return (self._shape.tail(self._fanout, self._prfaas()) if self._has_tail else b"") + DONE

    @property
    def _has_tail(self) -> bool:
        return self._fanout.prepared.params.include_usage

    def _prfaas(self) -> Any:
        return prfaas_object(self._fanout.reports, self._fanout.prepared.is_list) if self._wants_timing else None

    async def _write(self, payload: bytes) -> None:
        await self._prepare()
        await self._response.write(payload)
        self._written_at = self._loop.time()

    async def _write_last(self, payload: bytes) -> None:
        await self._prepare()
        # The transport takes it at once; a cancellation can only come while we wait for it to leave.
        self._request[SERVED] = True
        try:
            await self._response.write_eof(payload)
        except ConnectionError:
            self._request[SERVED] = False
            raise

    async def _prepare(self) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
