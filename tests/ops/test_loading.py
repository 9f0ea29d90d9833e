"""The HTTP port before the model is there: it says so, and not one connection is lost when it is."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from common.errors import StartupError
from common.http_server import GUARD, Guard, GuardedRunner
from common.loading import LoadingPage


@pytest.fixture
async def page():
    made = LoadingPage()
    yield made
    await made.close()


def real_runner() -> GuardedRunner:
    app = web.Application()
    app[GUARD] = Guard(CollectorRegistry(), 64)

    async def serve(request: web.Request) -> web.Response:
        return web.Response(text="served")

    app.router.add_route("*", "/{path:.*}", serve)
    return GuardedRunner(app)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


async def test_everything_but_livez_is_503_with_a_reason_and_a_time(page):
    port = free_port()
    await page.open("127.0.0.1", port, "http.port", 64)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.get("/livez") as reply:
            assert (reply.status, await reply.text()) == (200, "ok\n")
        for ask in (session.get("/readyz"), session.post("/v1/completions", json={"prompt": "a"}), session.get("/x")):
            async with ask as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["code"], reply.headers["Retry-After"]) == (503, "loading", "5")
                assert "loading its model" in error["message"]


async def test_no_connection_is_lost_when_the_port_is_handed_over(page):
    port = free_port()
    await page.open("127.0.0.1", port, "http.port", 64)
    runner = real_runner()
    seen: list[int] = []

    async def client() -> None:
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as session:
            while seen.count(200) < 60:
                async with session.get("/any") as reply:
                    seen.append(reply.status)

    clients = asyncio.gather(*(client() for _ in range(4)))
    while len(seen) < 20:
        await asyncio.sleep(0.001)
    assert await page.hand_over(runner) == port
    await clients
    assert set(seen) == {503, 200} and seen[-1] == 200
    await runner.cleanup()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_taken_port_is_named(page):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127.0.0.1:{port} \(http\.port\): Address already"):
            await page.open("127.0.0.1", port, "http.port", 64)


async def test_every_address_of_a_host_has_the_same_port(page):
    await page.open("localhost", 0, "http.port", 64)
    assert len({s.getsockname()[1] for s in page._sockets}) == 1
