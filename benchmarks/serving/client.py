"""The load generator: requests at given instants, streamed, timed by its own clock, one outcome each.

Times are seconds since the run began. Knows nothing of variants. Called by profile.py and measure.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
TIMEOUT_S = 1800.0
_REPORT = "prfaas"


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion: token ids of the prompt, how many tokens to make, when, and by which route if not any."""

    prompt: Sequence[int]
    num_output: int
    at_s: float = 0.0
    route: str = ""


@dataclass(slots=True)
class Answer:
    """What one request came to. `outcome` is "ok", or what went wrong; `stamps` are when its tokens came; `report` is
    decoded's own.
    """

    num_prompt: int
    num_output: int
    arrived_at: float
    outcome: str = "nothing came"
    stamps: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def first_token_at(self) -> float:
        return self.stamps[0]

    @property
    def done_at(self) -> float:
        return self.stamps[-1]

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float:
        """Mean seconds between tokens."""
        return (self.done_at - self.first_token_at) / max(1, self.num_output - 1)

    @property
    def timing(self) -> dict[str, float]:
        return dict(self.report["timing"])


def run_client(client: Callable[[str], Awaitable[T]], url: str) -> T:
    """Run it to its end, in whatever thread this is."""

    async def main() -> T:
        return await client(url)

    return asyncio.run(main())


async def ask_all(url: str, asks: Sequence[Ask]) -> list[Answer]:
    """All answers, in the order of asking; nobody waits for anybody."""
    timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        began = time.monotonic()
        # Requests are made before they are due: making one must not delay another.
        bodies = [_body(ask) for ask in asks]

        async def one(ask: Ask, body: bytes) -> Answer:
            await asyncio.sleep(began + ask.at_s - time.monotonic())
            return await _ask(session, ask, body, began)

        return list(await asyncio.gather(*(one(*pair) for pair in zip(asks, bodies, strict=True))))


async def ask_in_turn(url: str, asks: Sequence[Ask]) -> list[Answer]:
    """One after the other, each alone."""
    return [answer for ask in asks for answer in await ask_all(url, [ask])]


def _body(ask: Ask) -> bytes:
    # Log probabilities have every token make an event, also one that is no text yet.
    body = {"prompt": list(ask.prompt), "max_tokens": ask.num_output, "temperature": 0, "ignore_eos": True,
            "stream": True, "logprobs": 0}  # fmt: skip
    return json.dumps(body).encode()


async def _ask(session: aiohttp.ClientSession, ask: Ask, body: bytes, began: float) -> Answer:
    """Send it; never raises for what the server or the network does."""
    headers = {"Content-Type": "application/json", "X-Prfaas-Timing": "1"}
    headers |= {"X-Prfaas-Route": ask.route} if ask.route else {}
    answer = Answer(len(ask.prompt), ask.num_output, time.monotonic() - began)
    try:
        async with session.post("/v1/completions", data=body, headers=headers) as reply:
            if reply.status == 200:
                await _read(reply, answer, began)
            else:
                answer.outcome = f"status {reply.status}: {(await reply.text())[:200]}"
    except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError) as e:
        answer.outcome = f"{type(e).__name__}: {e}"
    return answer


async def _read(reply: aiohttp.ClientResponse, answer: Answer, began: float) -> None:
    num_tokens = 0
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        now, data = time.monotonic() - began, line[6:].strip()
        if data == b"[DONE]":
            complete = num_tokens == answer.num_output
            answer.outcome = "ok" if complete else f"{num_tokens} tokens of {answer.num_output}"
            return
        event = json.loads(data)
        if "error" in event:
            answer.outcome = f"error: {event['error']['message']}"
            return
        answer.report = event.get(_REPORT) or answer.report
        if event["choices"] and event["choices"][0].get("logprobs"):
            num_tokens += len(event["choices"][0]["logprobs"]["tokens"])
            answer.stamps.append(now)
    answer.outcome = "the stream ended without an end"
