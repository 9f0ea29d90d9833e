"""Whole answers and streams of both endpoints: shapes, counts, order, finish reasons."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from common.errors import EngineDead, NoPeer, Overloaded, RequestFailed


async def test_completion(serve):
    server = await serve()
    answer = await server.complete(max_tokens=5, user="me", model="test-model")
    assert answer["object"] == "text_completion" and answer["model"] == "test-model"
    assert answer["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "prfaas" not in answer
    request = server.dispatcher.submitted[0].request
    assert request.prompt_tokens == tuple(b"Say it") and request.sampling.max_tokens == 5


async def test_default_max_tokens_is_bounded_by_the_context(serve):
    server = await serve(max_context=20, default_max_tokens=100)
    await server.complete(prompt="0123456789")
    assert server.dispatcher.submitted[0].request.sampling.max_tokens == 10


async def test_lists_and_n_are_indexed_like_openai(serve, saying):
    server = await serve(saying("ab"))
    server.dispatcher.num_cached = 3
    answer = await server.complete(prompt=["x", "yy", "zzz"], n=2, max_tokens=2)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 9}
    requests = [a.request for a in server.dispatcher.submitted]
    assert [r.num_choices for r in requests] == [2, 2, 2] and len({r.request_id for r in requests}) == 3


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
async def test_token_id_prompts(serve, prompt):
    server = await serve()
    answer = await server.complete(prompt=prompt, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 3
    assert server.dispatcher.submitted[0].request.prompt_tokens == (1, 2, 3)


async def test_timing_object_is_a_list_for_a_list(serve):
    server = await serve()
    _, one = await server.post("/v1/completions", {"prompt": "x"}, X_Prfaas_Timing="1")
    assert one["prfaas"]["timing"]["ttft_s"] == 0.6 and one["prfaas"]["route"] == "local"
    assert set(one["prfaas"]) >= {"peer", "reason", "uncached_tokens", "wire_bytes", "raw_bytes", "codec"}
    _, many = await server.post("/v1/completions", {"prompt": ["x"]}, X_Prfaas_Timing="1")
    assert len(many["prfaas"]) == 1


async def test_chat(serve, saying):
    server = await serve(saying("Hi there"))
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    status, answer = await server.post("/v1/chat/completions", body)
    assert status == 200 and answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hi there", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert bytes(server.dispatcher.submitted[0].request.prompt_tokens) == b"user: a\nb\nassistant: "


async def test_completion_logprobs(serve, saying):
    server = await serve(saying("h\u00e9"))
    answer = await server.complete(logprobs=2, max_tokens=3)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.5] * 3 and len(logprobs["top_logprobs"]) == 3
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -1.5}
    assert logprobs["text_offset"] == [0, 1, 1]


async def test_zero_logprobs_still_give_the_chosen_token(serve):
    server = await serve()
    answer = await server.complete(logprobs=0, max_tokens=1)
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"h": -0.5}]


async def test_echo_with_logprobs(serve):
    server = await serve()
    answer = await server.complete(prompt="\u00e9!", echo=True, logprobs=1, max_tokens=2)
    choice = answer["choices"][0]
    assert choice["text"] == "\u00e9!he"
    logprobs = choice["logprobs"]
    assert (
        len(logprobs["tokens"]) == 5 and logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    )
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3]
    assert server.dispatcher.submitted[0].request.prompt_logprobs == 1


async def test_echo_alone_generates_nothing_for_the_client(serve):
    server = await serve()
    answer = await server.complete(prompt="abc", echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 3 and answer["usage"]["completion_tokens"] == 0
    assert server.dispatcher.submitted[0].request.sampling.max_tokens == 1


async def test_stop_string_spanning_tokens(serve, saying):
    server = await serve(saying("one. STOP two"))
    answer = await server.complete(stop=["STOP", "never"], n=2)
    assert [c["text"] for c in answer["choices"]] == ["one. ", "one. "]
    assert {c["finish_reason"] for c in answer["choices"]} == {"stop"}
    assert answer["usage"]["completion_tokens"] == 2 * len("one. STOP")
    assert server.dispatcher.submitted[0].cancelled_choices == [0, 1]


async def test_stop_string_counts_only_after_min_tokens(serve, saying):
    server = await serve(saying("abab"))
    answer = await server.complete(stop="ab", min_tokens=2)
    assert answer["choices"][0]["text"] == "ab" and answer["usage"]["completion_tokens"] == 4


async def test_eos_counts_as_a_token_and_is_not_shown(serve, spell):
    async def play(active):
        for output in spell([*b"ok", 0], finish="stop"):
            yield output

    server = await serve(play)
    answer = await server.complete()
    assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["finish_reason"] == "stop"


async def stream(server, read_events, path="/v1/completions", headers=None, **body):
    body = {"stream": True, **body}
    if path.endswith("chat/completions"):
        body.setdefault("messages", [{"role": "user", "content": "x"}])
    else:
        body.setdefault("prompt", "x")
    async with server.session.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return await read_events(response)


async def test_stream_completion(serve, saying, read_events):
    server = await serve(saying("h\u00e9llo \u4f60\u597d \U0001f469\u200d\U0001f467"))
    events, _ = await stream(server, read_events, n=2, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] > 0
    for index in (0, 1):
        chunks = [c for e in events[:-2] for c in e["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in chunks) == "h\u00e9llo \u4f60\u597d \U0001f469\u200d\U0001f467"
        assert all("\ufffd" not in c["text"] for c in chunks)
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["stop"]
    assert all(e["usage"] is None for e in events[:-2])


async def test_stream_chat_begins_with_the_role(serve, saying, read_events):
    server = await serve(saying("hey"))
    events, _ = await stream(server, read_events, "/v1/chat/completions")
    deltas = [e["choices"][0]["delta"] for e in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == "hey"
    assert events[-2]["choices"][0]["finish_reason"] == "stop" and events[-1] == "[DONE]"
    assert all(e["object"] == "chat.completion.chunk" for e in events[:-1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_timing_is_in_the_last_chunk(serve, read_events, path, include_usage):
    server = await serve()
    body = {"stream_options": {"include_usage": True}} if include_usage else {}
    events, _ = await stream(server, read_events, path, headers={"X-Prfaas-Timing": "1"}, **body)
    assert events[-2]["prfaas"]["reason"] == "below_threshold"
    assert not any("prfaas" in e for e in events[:-2])
    assert bool(events[-2]["choices"]) != include_usage


async def test_streamed_logprobs_equal_whole_ones(serve, saying, read_events):
    server = await serve(saying("logs STOP"))
    body = {"prompt": "p", "echo": True, "logprobs": 3, "stop": " STOP"}
    whole = (await server.complete(**body))["choices"][0]
    events, _ = await stream(server, read_events, **body)
    chunks = [e["choices"][0] for e in events[:-1]]
    assert "".join(c["text"] for c in chunks) == whole["text"] == "plogs"
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for c in chunks if c["logprobs"] for item in c["logprobs"][key]]
        assert joined == whole["logprobs"][key]


async def test_chat_logprobs(serve, saying):
    server = await serve(saying("\u00e9"))
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    _, answer = await server.post("/v1/chat/completions", body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]


OVERLOADED = Overloaded(
    "too many", gate="queued_requests", value=128, limit=128, setting="admission.max_queued_requests",
    retry_after_s=1.5, status=429,
)  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (OVERLOADED, 429, "2"),
        (NoPeer("no peer", value=900, limit=10, retry_after_s=3.0), 503, "3"),
        (EngineDead("dead"), 503, "1"),
        (RequestFailed("broken"), 500, None),
    ],
)
@pytest.mark.parametrize("at_submit", [False, True])
async def test_errors_before_the_first_byte(serve, error, status, retry_after, is_stream, at_submit):
    async def play(active):
        raise error
        yield

    server = await serve(play)
    if at_submit:
        server.dispatcher.submit_error = error
    async with server.session.post("/v1/completions", json={"prompt": "x", "stream": is_stream}) as response:
        assert response.status == status
        assert response.headers.get("Retry-After") == retry_after
        body = (await response.json())["error"]
        assert set(body) >= {"message", "type", "param", "code"} and body["message"] == str(error)
        if error is OVERLOADED:
            assert (body["gate"], body["value"], body["limit"]) == ("queued_requests", 128, 128)
            assert body["setting"] == "admission.max_queued_requests"


async def test_error_after_the_first_byte_is_an_event_without_done(serve, spell, read_events):
    async def play(active):
        for output in spell(list(b"abc"), finish=None):
            yield output
        await asyncio.sleep(0.01)
        raise RequestFailed("broke in the middle")

    server = await serve(play)
    events, _ = await stream(server, read_events)
    assert events[-1]["error"]["message"] == "broke in the middle" and "[DONE]" not in events


async def test_an_iteration_that_ends_early_is_an_error(serve, spell):
    async def play(active):
        for output in spell(list(b"abc"), finish=None):
            yield output

    server = await serve(play)
    status, body = await server.post("/v1/completions", {"prompt": "x"})
    assert status == 500 and "before its last token" in body["error"]["message"]


async def test_one_refused_prompt_cancels_the_others(serve):
    server = await serve()
    dispatcher, submit = server.dispatcher, server.dispatcher.submit

    def refuse_third(request, *, arrived_at):
        if len(dispatcher.submitted) == 2:
            raise OVERLOADED
        return submit(request, arrived_at=arrived_at)

    dispatcher.submit = refuse_third
    status, _ = await server.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    assert status == 429 and [a.is_cancelled for a in dispatcher.submitted] == [True, True]


async def test_silent_stream_gets_comments(serve, spell, read_events):
    async def play(active):
        await asyncio.sleep(0.5)
        for output in spell(list(b"late")):
            yield output

    server = await serve(play, sse_comment_s=0.1)
    events, comments = await stream(server, read_events)
    assert 2 <= len(comments) <= 6 and events[-1] == "[DONE]"


async def test_error_after_a_comment_is_an_event(serve, read_events):
    async def play(active):
        await asyncio.sleep(0.3)
        raise NoPeer("nobody left", value=1, limit=0)
        yield

    server = await serve(play, sse_comment_s=0.1)
    events, comments = await stream(server, read_events)
    assert comments and len(events) == 1 and events[0]["error"]["code"] == "no_peer"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_line_ends_in_text_are_no_line_ends_of_the_stream(serve, saying, read_events, path):
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh\u00e9"
    server = await serve(saying(text))
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with server.session.post(path, json={**body, "stream": True}) as response:
        raw = (await response.read()).decode()
    assert all(line == "" or line.startswith("data: ") for line in raw.splitlines())  # splits at all of them
    chunks = [json.loads(line[6:])["choices"][0] for line in raw.splitlines() if line.startswith("data: {")]
    assert "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in chunks) == text


async def test_slow_clients_get_larger_deltas(serve, spell):
    """Far more events than the sockets take: text gathers in the choice and arrives in fewer events, complete."""
    num_tokens = 40_000

    async def play(active):
        for _ in range(0, num_tokens, 10):
            for token in range(10):
                yield spell([97 + token], finish=None)[0]
            await asyncio.sleep(0)
        yield spell([33])[0]

    server = await serve(play, send_buffer_bytes=8192)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.wait_for(server.dispatcher.submitted[0].gone.wait(), 60)  # generated to the end, hardly anything read
    events = [json.loads(line[6:]) for line in (await reader.read()).splitlines() if line.startswith(b"data: {")]
    writer.close()
    assert "".join(e["choices"][0]["text"] for e in events) == "abcdefghij" * (num_tokens // 10) + "!"
    assert max(len(e["choices"][0]["text"]) for e in events) > 1000
