"""The real `openai` client and curl against real daemons and weights, on both routes."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from benchmarks.text import real_text

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module", params=["local", "remote"])
def client(cluster, request):
    headers = {"X-Prfaas-Route": request.param}
    with OpenAI(base_url=cluster.url + "/v1", api_key="none", default_headers=headers, max_retries=0) as c:
        yield c


def test_chat_streaming_equals_not_streaming(client):
    messages = [{"role": "user", "content": real_text(800) + "\nWhat is this about?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_logprobs(client):
    messages = [{"role": "user", "content": "Name a colour."}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(t.top_logprobs) == 3 and t.logprob == t.top_logprobs[0].logprob for t in content)
    assert "".join(t.token for t in content).startswith(answer.choices[0].message.content[:4])


def test_completion_n_3_is_three_samples(client):
    answer = client.completions.create(model=MODEL, prompt=real_text(600), max_tokens=8, n=3, temperature=1.0, seed=11)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.text for c in answer.choices}) > 1
    assert answer.usage.completion_tokens <= 24


def test_stop_string_ends_the_text(client):
    free = client.completions.create(model=MODEL, prompt="Count: one, two, three,", max_tokens=24, temperature=0)
    text = free.choices[0].text
    stop = text[6:9]
    stopped = client.completions.create(
        model=MODEL, prompt="Count: one, two, three,", max_tokens=24, temperature=0, stop=stop
    )
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < free.usage.completion_tokens


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    with pytest.raises(NotFoundError):
        client.completions.create(model="no-such-model", prompt="x")
    assert [m.id for m in client.models.list()] == [MODEL]


def test_curl_streams_and_ends_with_done(cluster):
    curl = shutil.which("curl")
    if curl is None:
        pytest.fail("curl is needed for this test: apt-get install curl")
    body = json.dumps({"prompt": "Hello", "max_tokens": 4, "stream": True})
    done = subprocess.run(
        [curl, "-sN", cluster.url + "/v1/completions", "-H", "Content-Type: application/json", "-d", body],
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] in ("length", "stop")
