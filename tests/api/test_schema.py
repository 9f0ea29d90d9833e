"""Every parameter: what is accepted, what it becomes, and which 400 names parameter, value and limit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.text.tokenizer import Tokenizer
from decoded.api.prepare import prepare
from decoded.api.prompts import resolve_sampling
from decoded.api.schema import Limits

LIMITS = Limits(model="test-model", vocab_size=256, max_context=512, default_max_tokens=64, max_prompts=8)
TOKENIZER = Tokenizer.bytes_only()
CHAT = [{"role": "user", "content": "hi"}]


def run(kind="completions", **body):
    base = {"prompt": "x"} if kind == "completions" else {"messages": CHAT}
    return prepare(kind, json.dumps({**base, **body}).encode(), LIMITS, TOKENIZER)


def refusal(kind="completions", **body):
    with pytest.raises(InvalidRequest) as caught:
        run(kind, **body)
    return caught.value


GOOD = [
    ("max_tokens", 1, lambda p: p.max_tokens == 1),
    ("max_completion_tokens", 7, lambda p: p.max_tokens == 7),
    ("max_tokens", 3.0, lambda p: p.max_tokens == 3),
    ("temperature", 0, lambda p: p.sampling.temperature == 0.0),
    ("temperature", 2, lambda p: p.sampling.temperature == 2.0),
    ("top_p", 0.5, lambda p: p.sampling.top_p == 0.5),
    ("top_p", 0, lambda p: (p.sampling.top_p, p.sampling.top_k) == (1.0, 1)),
    ("top_k", -1, lambda p: p.sampling.top_k == 0),
    ("top_k", 40, lambda p: p.sampling.top_k == 40),
    ("min_p", 0.1, lambda p: p.sampling.min_p == 0.1),
    ("seed", -(2**63), lambda p: p.sampling.seed == -(2**63)),
    ("seed", 0, lambda p: p.sampling.seed == 0),
    ("stop", "a", lambda p: p.stop == ("a",)),
    ("stop", ["a", "b", "a"], lambda p: p.stop == ("a", "b")),
    ("stop", [], lambda p: p.stop == ()),
    ("n", 8, lambda p: p.num_choices == 8),
    ("presence_penalty", -2, lambda p: p.sampling.presence_penalty == -2.0),
    ("frequency_penalty", 2, lambda p: p.sampling.frequency_penalty == 2.0),
    ("repetition_penalty", 1.3, lambda p: p.sampling.repetition_penalty == 1.3),
    ("logit_bias", {"7": -100, "3": 2.5}, lambda p: p.sampling.logit_bias == ((3, 2.5), (7, -100.0))),
    ("min_tokens", 5, lambda p: p.sampling.min_tokens == 5),
    ("ignore_eos", True, lambda p: p.sampling.ignore_eos),
    ("stream", True, lambda p: p.stream),
    ("user", "somebody", lambda p: True),
    ("model", "test-model", lambda p: True),
]


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize(("name", "value", "check"), GOOD, ids=[f"{n}={v}" for n, v, _ in GOOD])
def test_accepted(kind, name, value, check):
    assert check(run(kind, **{name: value}).params)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_null_is_absent(kind):
    names = {name for name, _, _ in GOOD} | {"logprobs", "stream_options"}
    assert run(kind, **dict.fromkeys(names)).params == run(kind).params


BAD = [
    ("max_tokens", 0, "512"),
    ("max_tokens", 513, "512"),
    ("max_tokens", 1.5, "integer"),
    ("max_tokens", True, "integer"),
    ("max_completion_tokens", -1, "512"),
    ("temperature", -0.1, "from 0 to 2"),
    ("temperature", 2.1, "from 0 to 2"),
    ("temperature", "hot", "from 0 to 2"),
    ("top_p", 1.01, "from 0 to 1"),
    ("top_k", -2, "256"),
    ("top_k", 257, "256"),
    ("min_p", -1, "from 0 to 1"),
    ("seed", 2**63, "9223372036854775807"),
    ("seed", "1", "integer"),
    ("stop", ["a"] * 5, "at most 4"),
    ("stop", [""], "1 to 4096"),
    ("stop", [1], "1 to 4096"),
    ("stop", {"a": 1}, "at most 4"),
    ("n", 0, "128"),
    ("n", 129, "128"),
    ("presence_penalty", 2.5, "from -2 to 2"),
    ("frequency_penalty", -3, "from -2 to 2"),
    ("repetition_penalty", 0, "from 0.01"),
    ("logit_bias", {"256": 1}, "below 256"),
    ("logit_bias", {"-1": 1}, "below 256"),
    ("logit_bias", {"x": 1}, "below 256"),
    ("logit_bias", [1], "object"),
    ("min_tokens", -1, "512"),
    ("ignore_eos", 1, "true or false"),
    ("stream", "yes", "true or false"),
    ("user", 5, "string"),
    ("model", 5, "string"),
    ("stream_options", {"include_usage": True}, "stream is true"),
]


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize(("name", "value", "limit"), BAD, ids=[f"{n}={v}" for n, v, _ in BAD])
def test_refused(kind, name, value, limit):
    error = refusal(kind, **{name: value})
    assert error.http_status == 400 and error.param.split(".")[0] == name
    assert name in str(error) and limit in str(error)


@pytest.mark.parametrize(
    "name",
    [
        "kv_transfer_params",
        "peer",
        "peers",
        "prefill_url",
        "remote_host",
        "do_remote_prefill",
        "cache_salt",
        "Temperature",
    ],
)
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_unknown_parameters(kind, name):
    for value in ("http://10.0.0.1/", None):
        error = refusal(kind, **{name: value})
        assert error.param == name and error.api_code == "unknown_parameter"


@pytest.mark.parametrize(
    ("kind", "name", "harmless", "harmful"),
    [
        ("completions", "best_of", 1, 2),
        ("completions", "best_of", 1, True),
        ("completions", "suffix", "", "end"),
        ("chat", "tools", [], [{"type": "function"}]),
        ("chat", "tool_choice", "auto", "required"),
        ("chat", "response_format", {"type": "text"}, {"type": "json_object"}),
        ("chat", "store", False, True),
        ("chat", "modalities", ["text"], ["audio"]),
        ("chat", "functions", [], [{}]),
        ("chat", "echo", False, True),
        ("chat", "reasoning_effort", None, "low"),
    ],
)
def test_unsupported_parameters(kind, name, harmless, harmful):
    run(kind, **{name: harmless})
    run(kind, **{name: None})
    error = refusal(kind, **{name: harmful})
    assert error.param == name and error.api_code == "unsupported_parameter"


def test_other_model_is_404():
    error = refusal(model="gpt-9")
    assert error.status == 404 and error.api_code == "model_not_found" and "test-model" in str(error)


def test_logprobs():
    assert run(logprobs=0).params.logprobs == 0
    assert run(logprobs=20).params.logprobs == 20
    assert run("chat", logprobs=True).params.logprobs == 0
    assert run("chat", logprobs=True, top_logprobs=20).params.logprobs == 20
    assert run("chat", logprobs=False).params.logprobs is None
    assert refusal(logprobs=21).param == "logprobs"
    assert refusal(logprobs=True).param == "logprobs"
    assert refusal("chat", logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refusal("chat", top_logprobs=1).param == "top_logprobs"
    assert refusal("chat", logprobs=1).param == "logprobs"


def test_token_limits_together():
    assert refusal(max_tokens=5, max_completion_tokens=6).param == "max_completion_tokens"
    assert run(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    assert refusal(min_tokens=6, max_tokens=5).param == "min_tokens"
    assert run(echo=True, max_tokens=0).params.max_tokens == 0
    assert refusal(echo=False, max_tokens=0).param == "max_tokens"


def test_context_length():
    assert len(run(prompt="x" * 511).prompts[0].tokens) == 511
    for body in ({"prompt": "x" * 512}, {"prompt": [1] * 512}, {"prompt": "x" * 500, "max_tokens": 13}):
        error = refusal(**body)
        assert error.api_code == "context_length_exceeded" and error.param == "prompt"
        assert "512" in str(error) and str(len(body["prompt"])) in str(error)
    assert refusal("chat", messages=[{"role": "user", "content": "x" * 600}]).param == "messages"
    assert "at least" in str(refusal(prompt="x" * 1_000_000))


def test_default_max_tokens():
    def resolved(**body):
        prepared = run(**body)
        return resolve_sampling(prepared.params, len(prepared.prompts[0].tokens), LIMITS).max_tokens

    assert resolved() == 64
    assert resolved(prompt="x" * 500) == 12
    assert resolved(min_tokens=100) == 100
    assert resolved(echo=True, max_tokens=0) == 1
    with pytest.raises(InvalidRequest):
        resolved(prompt="x" * 500, min_tokens=100)


PROMPTS = [
    (None, "missing"),
    (5, "a string"),
    ({}, "a string"),
    ([], "a string"),
    ("", "no tokens"),
    ([""], "no tokens"),
    ([[]], "no tokens"),
    ([1, "a"], "prompt[1]"),
    (["a", 1], "prompt[1]"),
    (["a", [1]], "prompt[1]"),
    ([[1], "a"], "prompt[1]"),
    ([256], "prompt[0] is 256"),
    ([-1], "255"),
    ([[1, 300]], "prompt[0][1] is 300"),
    ([True], "prompt[0]"),
    ([1.0], "prompt[0]"),
    (["a"] * 9, "at most 8"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=[json.dumps(p)[:30] for p, _ in PROMPTS])
def test_bad_prompts(prompt, message):
    assert message in str(refusal(prompt=prompt))


def test_tokens_that_the_model_does_not_have():
    small = replace(LIMITS, vocab_size=100)
    with pytest.raises(InvalidRequest, match="id 120; this model's ids end at 99"):
        prepare("completions", b'{"prompt": "ax"}', small, TOKENIZER)


def test_prompts_times_n_is_bounded():
    assert refusal(prompt=["a"] * 3, n=3).param == "n"
    assert len(run(prompt=["a"] * 4, n=2).prompts) == 4


MESSAGES = [
    (None, "missing"),
    ([], "at least one message"),
    ("hi", "at least one message"),
    (["hi"], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("messages", "message"), MESSAGES, ids=[json.dumps(m)[:40] for m, _ in MESSAGES])
def test_bad_messages(messages, message):
    assert message in str(refusal("chat", messages=messages))


def test_an_openai_answer_can_be_sent_back():
    answer = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert run("chat", messages=[*CHAT, answer, *CHAT]).prompts[0].tokens


def test_chat_without_a_template_says_so():
    bare = Tokenizer.bytes_only()
    bare._template = None
    with pytest.raises(InvalidRequest, match="no chat template"):
        prepare("chat", json.dumps({"messages": CHAT}).encode(), LIMITS, bare)


NAMES = sorted(
    {name for name, _, _ in GOOD}
    | {"logprobs", "top_logprobs", "stream_options", "echo", "best_of", "suffix", "tools", "response_format", "prompt"}
    | {"messages", "store", "metadata", "tool_choice"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 300)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(["\ud800", "auto", "test-model", "user", "text"])
)
KEYS = st.text(max_size=8) | st.sampled_from(["role", "content", "type", "text", "include_usage", "5", "\udfff"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


def check_fuzzed(kind, body):
    """Either a request the engine can trust, or a refusal: never another exception."""
    try:
        prepared = prepare(kind, json.dumps(body).encode(), LIMITS, TOKENIZER)
        for prompt in prepared.prompts:
            sampling = resolve_sampling(prepared.params, len(prompt.tokens), LIMITS)
            assert len(prompt.tokens) >= 1 and len(prompt.tokens) + (prepared.params.max_tokens or 0) <= 512
            assert 1 <= sampling.max_tokens <= 512 and 0 <= sampling.temperature <= 2 and 0 < sampling.top_p <= 1
            assert all(0 <= token < 256 for token in prompt.tokens)
    except InvalidRequest as error:
        json.dumps({"message": str(error), "param": error.param}).encode()
        str(error).encode()


@given(st.sampled_from(["completions", "chat"]), st.sampled_from(NAMES), VALUES)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_fuzzed_field(kind, name, value):
    check_fuzzed(kind, {"prompt": "x", "messages": CHAT, name: value})
    base = {"prompt": "x"} if kind == "completions" else {"messages": CHAT}
    check_fuzzed(kind, {**base, name: value})


@given(st.sampled_from(["completions", "chat"]), st.dictionaries(st.sampled_from(NAMES) | KEYS, VALUES, max_size=6))
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_fuzzed_body(kind, body):
    check_fuzzed(kind, body)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_fuzzed_bytes(body):
    with pytest.raises(InvalidRequest):
        prepare("completions", body, LIMITS, TOKENIZER)


@pytest.mark.parametrize(
    "form",
    [
        '{"prompt": %s}',
        '{"prompt": [1, %s]}',
        '{"prompt": "a", "model": %s}',
        '{"prompt": "a", "stop": %s}',
        '{"prompt": "a", "logit_bias": {"1": %s}}',
        '{"prompt": "a", "response_format": {"type": %s}}',
        '{"prompt": "a", "stream": true, "stream_options": {"include_usage": %s}}',
    ],
)
def test_nesting_around_what_the_parser_takes_is_refused_like_any_other(form):
    """There is a depth that is parsed, and is too deep for whoever describes the value in the error."""
    for depth in range(800, 1010):
        body = (form % ("[" * depth + "]" * depth)).encode()
        with pytest.raises(InvalidRequest):
            prepare("completions", body, LIMITS, TOKENIZER)
