"""A scripted dispatcher behind the real application on a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from common.errors import PdError
from common.layout import ModelInfo, StateLayout
from common.request import PromptLogprobs, Request, RequestReport, Timing, TokenLogprob, TokenOutput
from common.text.tokenizer import Tokenizer
from decoded.api.app import make_app, make_runner
from decoded.api.contract import ApiSettings

Play = Callable[["FakeActive"], AsyncIterator[TokenOutput | PromptLogprobs]]


class FakeActive:
    """One submitted request; plays its dispatcher's script."""

    def __init__(self, dispatcher: FakeDispatcher, request: Request) -> None:
        self.dispatcher, self.request = dispatcher, request
        self.report = RequestReport(request.request_id, num_prompt_tokens=request.num_prompt_tokens)
        self.cancelled_choices: list[int] = []
        self.is_cancelled = False
        self.is_ended = False
        self.gone = asyncio.Event()

    def cancel(self, choice: int | None = None) -> None:
        if choice is not None:
            self.cancelled_choices.append(choice)
            return
        if not self.is_ended:
            self.is_cancelled = True
        self.gone.set()

    async def __aiter__(self) -> AsyncIterator[TokenOutput | PromptLogprobs]:
        try:
            async for output in self.dispatcher.play(self):
                if isinstance(output, TokenOutput) and output.choice in self.cancelled_choices:
                    continue
                yield output
            self.report.timing = Timing(queue_s=0.1, route_s=0.2, first_token_s=0.3, ttft_s=0.6)
            self.report.reason = "below_threshold"
            self.report.num_cached_tokens = self.dispatcher.num_cached
            self.report.uncached_tokens = self.request.num_prompt_tokens - 1
            self.is_ended = True
        finally:
            self.gone.set()


@dataclass
class FakeDispatcher:
    """Plays `play` for every request; `submit_error` is raised instead when set."""

    play: Play
    info: ModelInfo
    submit_error: Exception | None = None
    refuse_after: int = 1 << 30
    num_cached: int = 0
    is_ready: tuple[bool, str] = (True, "ready")
    submitted: list[FakeActive] = field(default_factory=list)
    refused: list[PdError] = field(default_factory=list)
    arrived_at: float = 0.0

    def submit(self, request: Request, *, arrived_at: float) -> FakeActive:
        if self.submit_error is not None and len(self.submitted) < self.refuse_after:
            raise self.submit_error
        if self.submit_error is None and len(self.submitted) >= self.refuse_after:
            raise AssertionError("unexpected submit")
        self.arrived_at = arrived_at
        active = FakeActive(self, request)
        self.submitted.append(active)
        return active

    def count_refused(self, error: PdError) -> None:
        self.refused.append(error)

    def readiness(self) -> tuple[bool, str]:
        return self.is_ready

    def version(self) -> dict[str, Any]:
        return {"version": "0.0-test", "model": self.info.name}


def spell(
    ids: list[int], choice: int = 0, *, request: Request | None = None, finish: str | None = "length"
) -> list[TokenOutput]:
    """Outputs for the given ids of one choice, with made-up log probabilities when the request wants them."""
    outputs = []
    for number, token_id in enumerate(ids, start=1):
        logprob = None
        if request is not None and request.sampling.logprobs is not None:
            logprob = logprob_of(token_id, request.sampling.logprobs)
        outputs.append(TokenOutput(choice, token_id, number, logprob, finish if number == len(ids) else None))
    return outputs


def logprob_of(token_id: int, num_top: int) -> TokenLogprob:
    top = tuple(((token_id + k) % 256, -0.5 - k) for k in range(num_top))
    return TokenLogprob(token_id, -0.5, top)


def saying(text: str, *, finish: str = "stop") -> Play:
    """A script that says the same text, byte by byte, in every choice, interleaved."""

    async def play(active: FakeActive) -> AsyncIterator[TokenOutput | PromptLogprobs]:
        request = active.request
        if request.prompt_logprobs is not None:
            tokens = request.prompt_tokens
            yield PromptLogprobs((None, *(logprob_of(t, request.prompt_logprobs) for t in tokens[1:])))
        ids = list(text.encode())[: request.sampling.max_tokens]
        ended = "length" if len(ids) == request.sampling.max_tokens else finish
        rows = [spell(ids, choice, request=request, finish=ended) for choice in range(request.num_choices)]
        for column in zip(*rows, strict=True):
            for output in column:
                yield output
            await asyncio.sleep(0)

    return play


@dataclass
class Server:
    """The application under test and a client session pointed at it."""

    dispatcher: FakeDispatcher
    port: int
    session: aiohttp.ClientSession
    app: web.Application
    registry: CollectorRegistry

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.session.post(
            path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        ) as r:
            return r.status, await r.json()

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", {"prompt": "Say it", **body})
        assert status == 200, answer
        return answer


StartServer = Callable[..., Awaitable[Server]]

INFO = ModelInfo(
    name="test-model",
    weights_digest="w",
    config_digest="c",
    tokenizer_digest="t",
    layout=StateLayout(()),
    vocab_size=256,
    max_context=512,
    eos_token_ids=(0,),
)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer.bytes_only()


@pytest.fixture
async def serve(byte_tokenizer: Tokenizer) -> AsyncIterator[StartServer]:
    """Starts applications; keyword arguments are ApiSettings fields, `play`, `tokenizer` and `max_context`."""
    running: list[tuple[web.AppRunner, aiohttp.ClientSession]] = []

    async def start(
        play: Play | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        max_context: int = 512,
        handler_cancellation: bool = True,
        send_buffer_bytes: int = 0,
        **settings: Any,
    ) -> Server:
        tokenizer = tokenizer or byte_tokenizer
        info = replace(INFO, max_context=max_context, vocab_size=tokenizer.num_tokens)
        dispatcher = FakeDispatcher(play or saying("hello"), info)
        registry = CollectorRegistry()
        app = make_app(dispatcher, tokenizer, ApiSettings(**settings), registry)
        runner = make_runner(app, handler_cancellation=handler_cancellation)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)  # accepted sockets inherit it
        await web.SockSite(runner, listener).start()
        port = runner.addresses[0][1]
        session = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        running.append((runner, session))
        return Server(dispatcher, port, session, app, registry)

    yield start
    for runner, session in running:
        await session.close()
        await runner.cleanup()


async def read_events(response: aiohttp.ClientResponse) -> tuple[list[Any], list[str]]:
    """The data events (JSON, or "[DONE]") and the comments of a stream."""
    events: list[Any] = []
    comments: list[str] = []
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith(":"):
            comments.append(line)
        elif line.startswith("data: "):
            events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
        else:
            assert line == "", line
    return events, comments


@pytest.fixture(name="saying")
def saying_fixture() -> Callable[..., Play]:
    return saying


@pytest.fixture(name="spell")
def spell_fixture() -> Callable[..., list[TokenOutput]]:
    return spell


@pytest.fixture(name="read_events")
def read_events_fixture() -> Callable[..., Awaitable[tuple[list[Any], list[str]]]]:
    return read_events
