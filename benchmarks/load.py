"""A client that counts: N requests at a concurrency, exactly one outcome each, right tokens checked.

Outcomes: ok, wrong (200 with other text), error (a clean 5xx / 429 with a JSON error body, or an SSE error event), and
broken (the connection died or the stream ended without an end).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Outcome:
    """What one request came to; `detail` says more for people. `ended_at`: monotonic, set by run_load."""

    kind: str
    route: str = ""
    detail: str = ""
    peer: str = ""
    ended_at: float = 0.0


@dataclass
class LoadResult:
    """All outcomes of a run."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(o.kind for o in self.outcomes)

    @property
    def routes(self) -> Counter[str]:
        return Counter(o.route for o in self.outcomes if o.kind == "ok")

    def details(self, kind: str) -> list[str]:
        return [o.detail for o in self.outcomes if o.kind == kind]


@dataclass
class Job:
    """One completion to ask for and the text it must give."""

    body: dict[str, Any]
    expected: str


async def send(session: aiohttp.ClientSession, job: Job, headers: dict[str, str] | None = None) -> Outcome:
    """Send one job; never raises for what the server or the network does."""
    headers = {"X-Prfaas-Timing": "1", **(headers or {})}
    try:
        async with session.post("/v1/completions", json=job.body, headers=headers) as reply:
            if reply.status != 200:
                return await _clean_error(reply)
            if job.body.get("stream"):
                return await _read_stream(reply, job)
            answer = await reply.json()
            return _judge(answer["choices"][0]["text"], job, answer["prfaas"])
    except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as e:
        return Outcome("broken", detail=f"{type(e).__name__}: {e}")


async def run_load(
    url: str,
    jobs: Iterable[Job],
    concurrency: int,
    gate: Callable[[], Awaitable[None]] | None = None,
    into: LoadResult | None = None,
) -> LoadResult:
    """Run all jobs; `gate` is awaited before each request (to wait for a server that restarts); `into` grows."""
    result = LoadResult() if into is None else into
    pending = iter(jobs)
    timeout = aiohttp.ClientTimeout(total=900)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def worker() -> None:
            for job in pending:
                if gate is not None:
                    await gate()
                outcome = await send(session, job)
                outcome.ended_at = time.monotonic()
                result.outcomes.append(outcome)

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return result


async def _clean_error(reply: aiohttp.ClientResponse) -> Outcome:
    text = await reply.text()
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return Outcome("broken", detail=f"status {reply.status} without an error body: {text[:200]}")
    kind = "error" if reply.status >= 500 or reply.status == 429 else "wrong"
    return Outcome(kind, detail=f"{reply.status}: {error['message']}")


async def _read_stream(reply: aiohttp.ClientResponse, job: Job) -> Outcome:
    text, info = "", {}
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return _judge(text, job, info)
        event = json.loads(data)
        if "error" in event:
            return Outcome("error", detail=f"SSE: {event['error']['message']}")
        info = event.get("prfaas") or info
        text += "".join(c["text"] for c in event["choices"])
    return Outcome("broken", detail="the stream ended without [DONE]")


def _judge(text: str, job: Job, info: dict[str, Any]) -> Outcome:
    where = {"route": info.get("route", ""), "peer": info.get("peer") or ""}
    if text == job.expected:
        return Outcome("ok", **where)
    return Outcome("wrong", detail=f"got {text!r}, expected {job.expected!r}", **where)
