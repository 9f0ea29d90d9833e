"""One streaming client for every engine: POST /v1/completions with token ids, and the instant of every piece of text.

Knows nothing of cells and engines. A StreamRecord fills up while its request runs, so that others can watch it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT_S, READY_TIMEOUT_S = 1800.0, 300.0


async def get_ready(url: str) -> None:
    """Until decoded has recorded decode steps, as it does while idle after its start. Raises TimeoutError."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session, asyncio.timeout(READY_TIMEOUT_S):
        while True:
            async with session.get(f"{url}/metrics") as answer:
                if re.search(r"^prfaas_engine_warm 1", await answer.text(), re.MULTILINE):
                    return
            await asyncio.sleep(1.0)


class BadAnswer(RuntimeError):
    """The engine answered with an error, or with other tokens than it was asked for."""


@dataclass
class StreamRecord:
    """Instants (this process's monotonic clock) of one request: sent, each text event, end."""

    sent_at: float = 0.0
    events: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    num_tokens: int = 0
    text: str = ""
    progress: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def first_at(self) -> float:
        """The first text, or the end when the tokens had no text of their own."""
        return self.events[0] if self.events else self.ended_at

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.sent_at

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(begin, end) between neighbouring text events."""
        return list(zip(self.events, self.events[1:], strict=False))

    async def wait_events(self, num: int) -> None:
        """Return once there are `num` text events, or the stream has ended."""
        while len(self.events) < num and not self.ended_at:
            self.progress.clear()
            await self.progress.wait()


class Client:
    """Requests to one engine."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(self.url, connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def stream(self, prompt: Sequence[int], max_tokens: int, record: StreamRecord | None = None) -> StreamRecord:
        """One greedy completion of exactly `max_tokens` tokens. Raises BadAnswer."""
        record = record or StreamRecord()
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        record.sent_at = time.monotonic()
        try:
            async with self._session.post("/v1/completions", json=body) as reply:
                if reply.status != 200:
                    raise BadAnswer(f"status {reply.status}: {(await reply.text())[:300]}")
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        _take(record, json.loads(line[6:]))
        except aiohttp.ClientError as error:
            raise BadAnswer(f"{type(error).__name__}: {error}") from error
        finally:
            record.ended_at = time.monotonic()
            record.progress.set()
        if record.num_tokens != max_tokens:
            raise BadAnswer(f"{record.num_tokens} tokens instead of {max_tokens}")
        return record

    async def get(self, path: str) -> str:
        """The text of a page."""
        async with self._session.get(path) as reply:
            return await reply.text()


def _take(record: StreamRecord, event: dict[str, Any]) -> None:
    if "error" in event:
        raise BadAnswer(str(event["error"])[:300])
    if any(choice.get("text") for choice in event.get("choices", ())):
        record.events.append(time.monotonic())
        record.text += event["choices"][0]["text"]
        record.progress.set()
    if event.get("usage"):
        record.num_tokens = event["usage"]["completion_tokens"]
