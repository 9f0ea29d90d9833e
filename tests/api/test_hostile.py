"""Clients that mean harm, or are merely broken: inflating bodies, bodies that never end, and what nobody foresaw."""

from __future__ import annotations

import asyncio
import json
import logging
import zlib

import pytest

HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"


async def begin_body(server, size, data, extra=b"", path=b"/v1/completions"):
    """A raw client that has announced `size` bytes and sent `data` of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HEAD % (path, size) + extra + b"\r\n" + data)
    return reader, writer


async def read_answer(reader):
    async with asyncio.timeout(10.0):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        body = await reader.readexactly(int(lines[b"content-length"]))
    return int(head.split()[1]), json.loads(body)["error"], lines


def bomb(num_mb):
    """A gzip stream that inflates to that many MB: one block, flushed so that it can stand behind itself."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    start = deflate.compress(b"") + deflate.flush(zlib.Z_FULL_FLUSH)
    block = deflate.compress(b" " * (1 << 20)) + deflate.flush(zlib.Z_FULL_FLUSH)
    return start + block * num_mb


@pytest.mark.parametrize(("path", "status"), [(b"/v1/completions", 401), (b"/livez", 415), (b"/nowhere", 401)])
async def test_a_compressed_body_stops_nobody(serve, path, status):
    server = await serve(api_keys=("key",))
    data = bomb(3000)
    gaps, loop = [], asyncio.get_running_loop()

    async def tick():
        while True:
            before = loop.time()
            await asyncio.sleep(0.005)
            gaps.append(loop.time() - before)

    ticking = asyncio.create_task(tick())
    reader, writer = await begin_body(server, len(data) + 1, data, b"Content-Encoding: gzip\r\n", path)
    assert (await read_answer(reader))[0] == status
    await writer.drain()
    await asyncio.sleep(0.1)
    ticking.cancel()
    writer.close()
    assert max(gaps) < 0.5


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"zstd", b"foo", b"gzip, gzip", b"identity, gzip"])
async def test_content_encodings_are_refused(serve, coding, caplog):
    server = await serve()
    body = b'{"prompt": "x"}'
    reader, writer = await begin_body(server, len(body), body, b"Content-Encoding: %s\r\n" % coding)
    status, error, headers = await read_answer(reader)
    assert (status, error["code"], error["param"]) == (415, "unsupported_content_encoding", "Content-Encoding")
    assert b"x-request-id" in headers
    assert not [r for r in caplog.records if r.levelno > logging.INFO]
    writer.close()


@pytest.mark.parametrize("coding", ["identity", "Identity", ""])
async def test_no_encoding_by_its_name_is_fine(serve, coding):
    server = await serve()
    assert (await server.post("/v1/completions", {"prompt": "x"}, Content_Encoding=coding))[0] == 200


async def test_the_refusal_of_a_long_body_reaches_its_sender(serve):
    """The rest is read and dropped for a moment: closing at once would reset the connection before it was read."""
    server = await serve(api_keys=("key",))
    async with server.session.post("/v1/completions", json={"prompt": "x" * 5_000_000}) as response:
        assert response.status == 401


async def test_a_body_that_stops_coming_is_dropped(serve):
    server = await serve(body_stall_s=0.1)
    reader, _writer = await begin_body(server, 1000, b'{"prompt": "x')
    status, error, _ = await read_answer(reader)
    assert (status, error["code"]) == (408, "body_timeout")
    async with asyncio.timeout(10.0):
        assert await reader.read() == b""


async def test_a_slow_body_that_goes_on_is_taken(serve):
    server = await serve(body_stall_s=0.5)

    async def slow():
        for part in (b'{"pro', b'mpt":', b' "x"', b"}"):
            yield part
            await asyncio.sleep(0.2)

    headers = {"Content-Type": "application/json"}
    async with server.session.post("/v1/completions", data=slow(), headers=headers) as response:
        assert response.status == 200


async def test_all_bodies_together_are_bounded(serve):
    server = await serve(max_total_body_bytes=300_000, max_context=4096)
    part = b'{"prompt": "' + b"x" * 100_000
    waiting = [await begin_body(server, 500_000, part) for _ in range(3)]
    refused = []
    for reader, _ in waiting:
        try:
            async with asyncio.timeout(0.3):
                refused.append(await read_answer(reader))
        except TimeoutError:
            continue
    assert len(refused) == 1
    status, error, headers = refused[0]
    assert (status, error["gate"], error["setting"]) == (503, "body_bytes", "http.max_total_body_bytes")
    assert headers[b"retry-after"] == b"5" and 100_000 < error["value"] <= error["limit"] == 300_000
    assert [e.gate for e in server.dispatcher.refused] == ["body_bytes"]
    for _, writer in waiting:
        writer.transport.abort()
    async with asyncio.timeout(5.0):  # what they held is free as soon as they are gone
        while (await server.post("/v1/completions", {"prompt": "x", "user": "u", "stop": ["y" * 250_000]}))[0] == 503:
            await asyncio.sleep(0.01)


async def test_what_nobody_foresaw_is_a_500_that_says_its_request_id(serve, monkeypatch, caplog):
    server = await serve()
    monkeypatch.setattr(server.dispatcher, "submit", lambda *_, **__: 1 / 0)
    headers = {"X-Request-Id": "mine"}
    async with server.session.post("/v1/completions", json={"prompt": "x"}, headers=headers) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"], error["code"]) == (500, "server_error", "internal")
        assert response.headers["X-Request-Id"] == "mine" and "division" not in error["message"]
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert record.exc_info and record.exc_info[0] is ZeroDivisionError and record.request_id == "mine"
    labels = {"path": "/v1/completions", "status": "500"}
    assert server.registry.get_sample_value("prfaas_http_responses_total", labels) == 1


async def test_what_nobody_foresaw_in_a_stream_ends_it_without_done(serve, spell, caplog):
    async def play(active):
        yield spell([97], finish=None)[0]
        await asyncio.sleep(0.05)
        raise KeyError("bug")

    server = await serve(play)
    body = b'{"prompt": "x", "stream": true}'
    reader, _writer = await begin_body(server, len(body), body)
    async with asyncio.timeout(10.0):
        answer = await reader.read()
    assert b"data: {" in answer and b"[DONE]" not in answer and b"HTTP/1.1 500" not in answer
    assert len([r for r in caplog.records if r.exc_info]) == 1
