"""A client that leaves cancels its request everywhere within a second, whatever state it is in."""

from __future__ import annotations

import asyncio
import json
import time

import pytest


async def connect(server, **body):
    """A raw client that has sent its request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    payload = json.dumps({"prompt": "x", **body}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(payload), payload)
    )
    return reader, writer


async def submitted(server):
    while not server.dispatcher.submitted:
        await asyncio.sleep(0.005)
    return server.dispatcher.submitted[0]


def forever(spell, *, with_tokens):
    async def play(active):
        while True:
            if with_tokens:
                yield spell([97], finish=None)[0]
                await asyncio.sleep(0.01)
            else:
                await asyncio.sleep(3600)

    return play


@pytest.mark.parametrize("handler_cancellation", [True, False])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("with_tokens", [True, False])
async def test_leaving_cancels(serve, spell, is_stream, with_tokens, handler_cancellation):
    server = await serve(forever(spell, with_tokens=with_tokens), handler_cancellation=handler_cancellation)
    reader, writer = await connect(server, stream=is_stream, n=2)
    active = await submitted(server)
    if is_stream and with_tokens:
        await reader.readuntil(b"data: ")
    started_at = time.monotonic()
    writer.close()
    await asyncio.wait_for(active.gone.wait(), 1.0)
    assert active.is_cancelled and time.monotonic() - started_at < 1.0


async def test_leaving_cancels_every_prompt_of_a_list(serve, spell):
    server = await serve(forever(spell, with_tokens=False))
    _, writer = await connect(server, prompt=["a", "b", "c"])
    while len(server.dispatcher.submitted) < 3:
        await asyncio.sleep(0.005)
    writer.close()
    await asyncio.wait_for(asyncio.gather(*(a.gone.wait() for a in server.dispatcher.submitted)), 1.0)
    assert all(a.is_cancelled for a in server.dispatcher.submitted)


async def test_a_reset_connection_cancels(serve, spell):
    server = await serve(forever(spell, with_tokens=True), handler_cancellation=False)
    reader, writer = await connect(server, stream=True)
    await reader.readuntil(b"data: ")
    active = await submitted(server)
    writer.transport.abort()
    await asyncio.wait_for(active.gone.wait(), 1.0)
    assert active.is_cancelled


async def test_a_finished_request_is_not_counted_as_cancelled(serve):
    server = await serve()
    await server.complete()
    assert not server.dispatcher.submitted[0].is_cancelled
    samples = {
        tuple(sorted(s.labels.items())): s.value
        for m in server.registry.collect()
        for s in m.samples
        if "_total" in s.name
    }
    assert samples[("path", "/v1/completions"), ("status", "200")] == 1.0


async def test_leaving_is_counted(serve, spell):
    server = await serve(forever(spell, with_tokens=False))
    _, writer = await connect(server)
    active = await submitted(server)
    writer.close()
    await asyncio.wait_for(active.gone.wait(), 1.0)

    def count():
        return server.registry.get_sample_value(
            "prfaas_http_responses_total", {"path": "/v1/completions", "status": "499"}
        )

    async with asyncio.timeout(1.0):
        while count() != 1.0:
            await asyncio.sleep(0.005)
