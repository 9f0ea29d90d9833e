"""What an HTTP request counts as, exactly once, and the small print of answers: headers, content types, `chat`."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from openai import OpenAI

from common.errors import Draining
from common.text.tokenizer import Tokenizer


def status_counts(server, path="/v1/completions"):
    return {
        sample.labels["status"]: sample.value
        for metric in server.registry.collect()
        for sample in metric.samples
        if sample.name == "prfaas_http_responses_total" and sample.labels["path"] == path
    }


async def counted(server, path="/v1/completions"):
    async with asyncio.timeout(5.0):
        while not (counts := status_counts(server, path)):
            await asyncio.sleep(0.005)
    return counts


async def test_a_client_that_closes_right_after_done_was_served(serve, monkeypatch):
    """The worst moment: all is handed to the transport, and the handler is still waiting when the client closes."""
    write_eof = web.StreamResponse.write_eof

    async def written_and_waiting(self, data=b""):
        await write_eof(self, data)
        await asyncio.sleep(3600)

    monkeypatch.setattr(web.StreamResponse, "write_eof", written_and_waiting)
    server = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    await reader.readuntil(b"[DONE]")
    writer.transport.abort()
    assert await counted(server) == {"200": 1.0}


async def test_streams_that_the_openai_client_reads_to_the_end_are_200(serve):
    server = await serve()

    def read_all():
        with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            for _ in range(20):
                for _ in client.completions.create(model="test-model", prompt="x", stream=True):
                    pass

    await asyncio.to_thread(read_all)
    async with asyncio.timeout(5.0):
        while sum(status_counts(server).values()) < 20:
            await asyncio.sleep(0.005)
    assert status_counts(server) == {"200": 20.0}


async def test_every_refusal_before_submission_is_counted_once(serve):
    server = await serve(api_keys=("key",), max_body_bytes=1000)
    auth = {"Authorization": "Bearer key"}
    posts = [
        ({"json": {"prompt": "x", "temperature": 9}}, 400),
        ({"json": {"prompt": "x", "frobnicate": 1}}, 400),
        ({"json": {"prompt": "x", "model": "other"}}, 404),
        ({"data": b"{", "headers": {"Content-Type": "application/json"}}, 400),
        ({"json": {"prompt": "x" * 2000}}, 413),
        ({"json": {"prompt": "x"}, "headers": {"X-Request-Id": "a b"}}, 400),
        ({"json": {"prompt": "x"}, "headers": {"X-Prfaas-Timing": "perhaps"}}, 400),
    ]
    for number, (options, status) in enumerate(posts, start=1):
        headers = auth | options.pop("headers", {})
        async with server.session.post("/v1/completions", headers=headers, **options) as response:
            assert response.status == status
        assert len(server.dispatcher.refused) == number
    for path, options in (("/v1/nothing", {"headers": auth}), ("/v1/completions", {})):
        async with server.session.post(path, json={"prompt": "x"}, **options) as response:
            assert response.status in (401, 404)
    assert len(server.dispatcher.refused) == len(posts)  # neither strangers nor other paths


async def test_what_the_dispatcher_refuses_is_its_own_to_count(serve):
    server = await serve()
    server.dispatcher.submit_error = Draining("later")
    async with server.session.post("/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 503
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert (await response.json())["error"]["code"] == "draining"
        waits = response.headers["Retry-After"]
    assert server.dispatcher.refused == []
    server.dispatcher.is_ready = (False, "draining")
    async with server.session.get("/readyz") as response:
        assert (response.status, response.headers["Retry-After"]) == (503, waits)


@pytest.mark.parametrize(
    ("headers", "data", "status"),
    [
        ({"Content-Type": "application/x-www-form-urlencoded"}, b'{"prompt": "x"}', 200),
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"prompt=x", 400),
        ({"Content-Type": "application/x-www-form-urlencoded", "Origin": "https://a.example"}, b'{"prompt": "x"}', 415),
        ({"Content-Type": "application/json", "Origin": "https://my.example"}, b'{"prompt": "x"}', 200),
        ({}, b'{"prompt": "x"}', 200),
    ],
)  # fmt: skip
async def test_what_curl_sends_without_a_content_type_is_json(serve, headers, data, status):
    server = await serve()
    async with server.session.post(
        "/v1/completions", data=data, headers=headers, skip_auto_headers=["Content-Type"]
    ) as response:
        assert response.status == status, await response.text()


async def test_server_header_names_the_product_only(serve):
    server = await serve()
    for path in ("/livez", "/v1/models", "/nothing"):
        async with server.session.get(path) as response:
            assert response.headers["Server"] == "prfaas"
    async with server.session.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert response.headers["Server"] == "prfaas" and "X-Prfaas-Warning" not in response.headers


async def test_a_warning_goes_with_every_answer(serve):
    server = await serve(warning="tokens mean nothing")
    for options in ({}, {"stream": True}, {"n": 0}):
        async with server.session.post("/v1/completions", json={"prompt": "x", **options}) as response:
            assert response.headers["X-Prfaas-Warning"] == "tokens mean nothing"
    async with server.session.get("/livez") as response:
        assert "X-Prfaas-Warning" not in response.headers


async def test_models_say_whether_there_is_chat(serve, byte_tokenizer):
    for tokenizer, has_chat in ((byte_tokenizer, True), (Tokenizer(byte_tokenizer._backend, None), False)):
        server = await serve(tokenizer=tokenizer)
        async with server.session.get("/v1/models") as response:
            assert [m["chat"] for m in (await response.json())["data"]] == [has_chat]
