"""The real `openai` client and curl, unchanged, against the application."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from common.errors import NoPeer, RequestFailed

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


def client_of(server, **options):
    return AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, **options)


async def test_completion(serve):
    async with client_of(await serve()) as client:
        answer = await client.completions.create(model="test-model", prompt="x", max_tokens=3, logprobs=2, echo=False)
    assert answer.choices[0].text == "hel" and answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_with_n_3_and_logprobs(serve, saying):
    async with client_of(await serve(saying("Hello!"))) as client:
        answer = await client.chat.completions.create(
            model="test-model", messages=MESSAGES, n=3, logprobs=True, top_logprobs=2, max_completion_tokens=50
        )
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert {c.message.content for c in answer.choices} == {"Hello!"}
    assert answer.usage.completion_tokens == 18 and len(answer.choices[2].logprobs.content) == 6
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


async def test_chat_stream_with_stop_and_usage(serve, saying):
    async with client_of(await serve(saying("Hello, world. And more"))) as client:
        stream = await client.chat.completions.create(
            model="test-model",
            messages=MESSAGES,
            stream=True,
            stop=[". "],
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello, world"
    assert chunks[-1].usage.completion_tokens == len("Hello, world. ")
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]


async def test_completion_stream(serve, saying):
    async with client_of(await serve(saying("\u4f60\u597d \U0001f600"))) as client:
        stream = await client.completions.create(model="test-model", prompt=["a", "b"], stream=True, echo=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["a\u4f60\u597d \U0001f600", "b\u4f60\u597d \U0001f600"]


async def test_errors_become_the_clients_exceptions(serve, spell):
    async def play(active):
        for output in spell([97], finish=None):
            yield output
        await asyncio.sleep(0.01)
        raise RequestFailed("broke")

    server = await serve(play, api_keys=("none",))
    async with client_of(server) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="test-model", prompt="x", temperature=3)
        assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-9", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.APIError, match="broke"):
            async for _ in await client.completions.create(model="test-model", prompt="x", stream=True):
                pass
        server.dispatcher.submit_error = NoPeer("nobody", value=1, limit=0)
        with pytest.raises(openai.InternalServerError) as unavailable:
            await client.completions.create(model="test-model", prompt="x")
        assert unavailable.value.status_code == 503 and unavailable.value.response.headers["Retry-After"] == "1"
        assert [m.id async for m in await client.models.list()] == ["test-model"]
        assert (await client.models.retrieve("test-model")).id == "test-model"


async def test_breaking_out_of_a_stream_cancels(serve, spell):
    async def play(active):
        while True:
            yield spell([97], finish=None)[0]
            await asyncio.sleep(0.01)

    server = await serve(play)
    async with client_of(server) as client:
        stream = await client.chat.completions.create(model="test-model", messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.wait_for(server.dispatcher.submitted[0].gone.wait(), 1.0)
    assert server.dispatcher.submitted[0].is_cancelled


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_curl(serve, is_stream):
    server = await serve()
    body = json.dumps({"model": "test-model", "messages": MESSAGES, "stream": is_stream})
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sSN", "--fail", server.url + "/v1/chat/completions"),
        *("-H", "Content-Type: application/json", "-d", body),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    if is_stream:
        assert output.endswith(b"data: [DONE]\n\n") and output.startswith(b'data: {"id":')
    else:
        assert json.loads(output)["choices"][0]["message"]["content"] == "hello"


FIELDS = ["prompt", "messages", "model", "stop", "n", "max_tokens", "logit_bias", "stream_options", "logprobs", "top_k"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 600) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


async def test_fuzzed_requests_are_never_5xx(serve):
    """Over a real socket, to see the whole path: parsing, errors, headers, answers."""
    server = await serve()
    loop = asyncio.get_running_loop()
    client = http.client.HTTPConnection("127.0.0.1", server.port)

    @given(
        st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
        st.dictionaries(st.sampled_from([*FIELDS, "temperature", "echo", "stream", "unknown"]), VALUES, max_size=4),
        st.dictionaries(
            st.sampled_from(["X-Request-Id", "X-Prfaas-Timing", "X-Prfaas-Route", "Authorization", "Content-Type"]),
            st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
            max_size=2,
        ),
    )
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def check(path, body, headers):
        base = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
        content = json.dumps({**base, **body}).encode()
        client.request("POST", path, content, {"Content-Type": "application/json", **headers})
        response = client.getresponse()
        answer = response.read()
        assert response.status == 200 or 400 <= response.status < 500, answer
        if response.status != 200:
            assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}

    await loop.run_in_executor(None, check)
    client.close()
