"""The HTTP server both daemons share: what it refuses, drops and survives, over real sockets."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
from pathlib import Path

import pytest
import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry

from common import http_server
from common.http_server import GUARD, Guard, GuardedRunner
from prefilld.http import make_app, make_runner

GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


class Server:
    """A small application behind the guard. /slow answers when `release` is set, /size says what the body was."""

    def __init__(self, max_connections: int = 100, **guard: float) -> None:
        self.registry = CollectorRegistry()
        self.make_runner = GuardedRunner
        self.release = asyncio.Event()
        self.num_slow = 0
        self.clients: list[asyncio.StreamWriter] = []  # collected ones would close their connections
        self.app = web.Application()
        self.app[GUARD] = Guard(self.registry, max_connections, **guard)
        for path, handler in (("/slow", self.slow), ("/bug", self.bug), ("/fast", self.fast)):
            self.app.router.add_get(path, handler)
        self.app.router.add_post("/size", self.size)
        self.app.router.add_post("/slow", self.slow)

    async def slow(self, _: web.Request) -> web.Response:
        self.num_slow += 1
        await self.release.wait()
        return web.Response(text="done")

    async def fast(self, _: web.Request) -> web.Response:
        return web.Response(text="fast")

    async def bug(self, _: web.Request) -> web.Response:
        raise KeyError("secret")

    async def size(self, request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.content.read())))

    async def __aenter__(self) -> Server:
        self.runner = self.make_runner(self.app)
        await self.runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        await web.SockSite(self.runner, listener).start()
        self.port = self.runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release.set()
        for client in self.clients:
            client.close()
        await self.runner.cleanup()

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        self.clients.append(writer)
        return reader, writer

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        reader, writer = await self.connect(data)
        answer = await read_answer(reader)
        writer.close()
        return answer

    def closed(self, reason: str) -> float | None:
        return self.registry.get_sample_value("prfaas_http_connections_closed_total", {"reason": reason})

    async def until_open(self, num: int) -> None:
        async with asyncio.timeout(5.0):
            while self.registry.get_sample_value("prfaas_http_connections") != num:
                await asyncio.sleep(0.005)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(5.0):
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
        return int(head.split()[1]), await reader.readexactly(int(lengths[0]))


async def test_bodies_are_never_inflated() -> None:
    async with Server() as server:
        for encoding in (b"gzip", b"deflate", b"br", b"zstd", b"foo", b"gzip, gzip"):
            head = b"POST /size HTTP/1.1\r\nHost: x\r\nContent-Encoding: %s\r\nContent-Length: 9\r\n\r\n" % encoding
            assert await server.ask(head + b"not a zip") == (200, b"9"), encoding


@pytest.mark.parametrize("data", [b"", b"GET /fast HTTP/1.1\r\nHos"])
async def test_a_connection_without_a_request_ends(data: bytes) -> None:
    async with Server(head_timeout_s=0.05) as server:
        reader, _ = await server.connect(data)
        async with asyncio.timeout(5.0):
            assert await reader.read() == b""
        assert server.closed("head") == 1
        await server.until_open(0)


async def test_the_head_timeout_is_over_once_the_request_is_there() -> None:
    async with Server(head_timeout_s=0.05) as server:
        reader, _ = await server.connect(GET % b"slow")
        await asyncio.sleep(0.2)
        server.release.set()
        assert await read_answer(reader) == (200, b"done")
        assert server.closed("head") == 0


@pytest.mark.parametrize("more", [b"", b"GET /fa"])
async def test_an_idle_connection_ends(more: bytes) -> None:
    async with Server(idle_timeout_s=0.1) as server:
        reader, writer = await server.connect(GET % b"fast")
        assert await read_answer(reader) == (200, b"fast")
        writer.write(more)
        async with asyncio.timeout(5.0):
            assert await reader.read() == b""


async def full_server() -> None:
    async with Server(max_connections=2) as server:
        idle, _ = await server.connect()
        await server.until_open(1)
        busy = [(await server.connect(GET % b"slow"))[0]]
        await server.until_open(2)
        busy.append((await server.connect(GET % b"slow"))[0])
        async with asyncio.timeout(5.0):
            assert await idle.read() == b""
        assert server.closed("idle") == 1
        async with asyncio.timeout(5.0):
            while server.num_slow < 2:
                await asyncio.sleep(0.005)
        status, body = await server.ask(b"")
        assert (status, json.loads(body)["error"]["code"]) == (503, "connections")
        assert server.closed("connections") == 1
        server.release.set()
        assert [await read_answer(reader) for reader in busy] == [(200, b"done")] * 2
        assert await server.ask(GET % b"fast") == (200, b"fast")


async def test_a_full_server_drops_who_is_idle_and_refuses_when_all_are_busy() -> None:
    await full_server()


def test_the_same_on_the_event_loop_of_the_daemons() -> None:
    uvloop.run(full_server())


async def test_one_idle_connection_after_its_answer_makes_room_too() -> None:
    async with Server(max_connections=1) as server:
        for _ in range(3):
            reader, _ = await server.connect(GET % b"fast")
            assert await read_answer(reader) == (200, b"fast")
        assert server.closed("idle") == 2


async def test_the_last_descriptors_are_not_for_http(monkeypatch, caplog) -> None:
    async with Server() as server:
        assert await server.ask(GET % b"fast") == (200, b"fast")
        await server.until_open(0)
        monkeypatch.setattr(http_server, "descriptor_limit", lambda: http_server.num_descriptors() + 1)
        server.app[GUARD].look_at_descriptors(0)
        with caplog.at_level(logging.WARNING, "common.http_server"):
            for _ in range(3):
                assert (await server.ask(b""))[0] == 503
        assert server.closed("descriptors") == 3
        assert len(caplog.records) == 1, "the log is damped"


def test_descriptors_are_counted() -> None:
    num = http_server.num_descriptors()
    with socket.socket(), socket.socket():
        assert http_server.num_descriptors() == num + 2
    assert http_server.num_descriptors() == num == sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


async def test_connections_get_what_others_and_the_reserve_leave(monkeypatch) -> None:
    """And not what their numbers say: freed low ones are taken again while high ones stay open."""
    guard = Guard(CollectorRegistry(), 1000)
    monkeypatch.setattr(http_server, "descriptor_limit", lambda: 64)
    monkeypatch.setattr(http_server, "num_descriptors", lambda: 25)
    guard.look_at_descriptors(5)
    assert guard.num_for_connections == 64 - 16 - 20
    assert (guard.lacks(27), guard.lacks(28)) == ("", "descriptors")


def test_the_reserve() -> None:
    assert [http_server.descriptor_reserve(n) for n in (64, 1024, 65536)] == [16, 256, 256]


async def test_descriptors_that_ran_out_are_seen(monkeypatch, caplog) -> None:
    guard = Guard(registry := CollectorRegistry(), 1)
    guard.look_at_descriptors(0)
    assert registry.get_sample_value("prfaas_no_descriptor_seconds_total") == 0

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", none_left)
    for _ in range(3):
        guard.look_at_descriptors(0)
    assert registry.get_sample_value("prfaas_no_descriptor_seconds_total") == 3
    assert ["no file descriptor is left" in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GET /fast HTTP/9.9\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00garbage\r\n\r\n", 400, "invalid_http"),
        (b"GET /fast HTTP/1.1\r\nHost: x\r\nBad Header: x\r\n\r\n", 400, "invalid_http"),
        (b"GET /fast HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 9000 + b"\r\n\r\n", 400, "invalid_http"),
        (b"GET /fast HTTP/1.1\r\nHost: x\r\nExpect: foo\r\n\r\n", 417, "expectation_failed"),
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\nExpect: foo\r\n\r\n", 417, "expectation_failed"),
    ],
)
async def test_malformed_http_is_answered_in_json_and_stays_out_of_the_log(data, status, code, caplog) -> None:
    async with Server() as server:
        answer = await server.ask(data)
        assert (answer[0], json.loads(answer[1])["error"]["code"]) == (status, code)
        assert server.registry.get_sample_value("prfaas_http_malformed_total") == 1
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


async def test_what_no_application_foresaw_is_a_500_in_json(caplog) -> None:
    async with Server() as server:
        status, body = await server.ask(GET % b"bug")
    assert (status, json.loads(body)["error"]["type"]) == (500, "server_error") and b"secret" not in body
    assert [r.exc_info is not None for r in caplog.records if r.levelno >= logging.ERROR] == [True]


async def test_missing_paths_and_methods_in_json() -> None:
    async with Server() as server:
        for data, status, code in ((GET % b"none", 404, "not_found"), (GET % b"size", 405, "method_not_allowed")):
            answer = await server.ask(data)
            assert (answer[0], json.loads(answer[1])["error"]["code"]) == (status, code)


async def test_pipelined_requests_are_served_in_order() -> None:
    async with Server() as server:
        reader, _ = await server.connect(GET % b"fast" * 20)
        assert [await read_answer(reader) for _ in range(20)] == [(200, b"fast")] * 20


async def test_what_waits_behind_a_busy_request_is_bounded() -> None:
    async with Server() as server:
        client = socket.create_connection(("127.0.0.1", server.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
        client.setblocking(False)
        post = b"POST /size HTTP/1.1\r\nHost: x\r\nContent-Length: 120000\r\n\r\n" + b"x" * 120_000
        data, num_sent, num_stuck = GET % b"slow" + post * 32, 0, 0
        while num_stuck < 100 and num_sent < len(data):
            try:
                num_sent += client.send(data[num_sent : num_sent + 65536])
                num_stuck = 0
            except BlockingIOError:
                num_stuck += 1
                await asyncio.sleep(0.002)
        client.close()
        assert num_sent < 1_500_000, "all of it was taken in"


@pytest.mark.parametrize("path", [b"livez", b"metrics", b"nowhere"])
async def test_prefilld_takes_no_bodies(path: bytes) -> None:
    server = Server()
    guard = Guard(CollectorRegistry(), max_connections=10)
    server.app = make_app(readiness=lambda: (True, ""), metrics=bytes, handlers={"version": None}, guard=guard)
    server.make_runner = make_runner
    async with server:
        for head in (b"Content-Encoding: gzip\r\nContent-Length: 3000000", b"Transfer-Encoding: chunked"):
            reader, _ = await server.connect(b"POST /%s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % (path, head))
            status, body = await read_answer(reader)
            assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
            async with asyncio.timeout(5.0):
                assert await reader.read() == b"", "the connection stays open for the rest of the body"
        assert (await server.ask(b"POST /livez HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 405
