"""Ids and text equal what transformers gives for the same directory; nothing blocks the event loop."""

from __future__ import annotations

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest, StartupError
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import PromptOverContext, Tokenizer

TEXTS = [
    "Hello, world!",
    " two  spaces\n\n\tand a tab ",
    "\u4f60\u597d\uff0c\u4e16\u754c \ud55c\uad6d\uc5b4 \u1112\u1161\u11ab",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f600 \u0645\u0631\u062d\u0628\u0627",
    "<|im_start|>user\nhi<|im_end|> <bos><eos> <0x41>",
    "def f(x):\n    return x ** 2  # caf\u00e9 \u0000 \ufffd",
    "x" * 1000,
]
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  \u4f60\u597d <|im_end|> "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\n"},
    ],
]
EXTENDED_TEMPLATE = """{%- set ns = namespace(last='') -%}{{ bos_token }}{% for m in messages %}
{%- if m.name is defined %}[{{ m.name }}]{% endif %}{% if not loop.last and m.role == 'skip' %}{% continue %}{% endif %}
<{{ m['role'] }}>{% generation %}{{ m['content'] | trim }}{% endgeneration %}{% set ns.last = m.role %}
{%- endfor %}{{ {'b': 1, 'a': '<\u00e9>'} | tojson }}{{ strftime_now('%Y') | length }}{{ dict(a=1).a }}
{{- tools is none }}
{%- if ns.last == 'assistant' %}{{ raise_exception('must not end with the assistant') }}{% endif %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module", params=["smollm2_dir", "gemma3_dir"])
def pair(request):
    """Our tokenizer and transformers' for the same directory."""
    from transformers import AutoTokenizer

    path = request.getfixturevalue(request.param)
    return Tokenizer.load(path), AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(pair, text):
    ours, theirs = pair
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs(text, add_special_tokens=special)["input_ids"]
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("template", ["own", "extended"])
@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
def test_chat_ids_equal_transformers(pair, chat, template):
    ours, theirs = pair
    source = theirs.chat_template if template == "own" else EXTENDED_TEMPLATE
    if source is None:
        with pytest.raises(InvalidRequest, match="no chat template"):
            ours.encode_chat(chat)
        return
    ours = Tokenizer(ours._backend, ChatTemplate(source, dict(theirs.special_tokens_map)))
    named = [{**message, "name": None} for message in chat]
    expected = theirs.apply_chat_template(
        named, chat_template=source, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ours.encode_chat(named) == expected


def test_own_special_tokens_reach_the_template(pair):
    ours, theirs = pair
    if ours._template is not None:
        assert ours._template._special_tokens == dict(theirs.special_tokens_map)


@pytest.mark.parametrize("skip", [True, False])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_random_ids_joined_equal_the_whole(pair, skip, seed):
    ours, _ = pair
    rng = random.Random(seed)
    ids = [rng.randrange(ours.num_tokens if rng.random() < 0.4 else 520) for _ in range(rng.randrange(40))]
    detokenizer = ours.detokenizer(skip_special_tokens=skip)
    assert "".join(map(detokenizer.add, ids)) + detokenizer.flush() == ours.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_text_goes_round_without_split_characters(pair, text):
    ours, _ = pair
    ids = ours.encode(text, add_special_tokens=False)
    detokenizer = ours.detokenizer(skip_special_tokens=False)
    deltas = [detokenizer.add(token) for token in ids]
    joined = "".join(deltas) + detokenizer.flush()
    assert joined == ours.decode(ids, skip_special_tokens=False)
    if joined == text and "\ufffd" not in text:  # a vocabulary may lack rare bytes and drop them
        assert not any("\ufffd" in delta for delta in deltas)


def test_echo_knows_the_added_prefix(pair):
    ours, _ = pair
    for text in ("Hi", "<bos>Hi", "<|im_start|>Hi"):
        ids = tuple(ours.encode(text))
        assert ours.decode(ids[ours.num_prefix :], skip_special_tokens=False) == text


def test_long_prompts_are_refused_without_encoding_all_of_them(pair):
    ours, _ = pair
    text = "The quick brown fox jumps. " * 1_000_000
    started_at = time.perf_counter()
    with pytest.raises(PromptOverContext) as caught:
        ours.encode(text, max_tokens=8192)
    assert caught.value.is_lower_bound and 8192 < caught.value.num_tokens <= 8_000_000
    assert time.perf_counter() - started_at < 2.0


@given(
    st.lists(st.sampled_from(["word ", "\u4f60\u597d", "aaaa", "\n", "  ", "<|im_end|>", "\U0001f600"]), max_size=400)
)
@settings(max_examples=100, deadline=None)
def test_the_limit_is_exact(pair, parts):
    ours, _ = pair
    text = "".join(parts) * 8
    num_tokens = len(ours.encode(text))
    assert len(ours.encode(text, max_tokens=num_tokens)) == num_tokens
    if num_tokens > 1:
        with pytest.raises(PromptOverContext):
            ours.encode(text, max_tokens=num_tokens - 1)


async def test_encoding_leaves_the_event_loop_alone(pair):
    ours, _ = pair
    text = "The quick brown fox, \u4f60\u597d, jumps over 12345 dogs. " * 8000
    gaps, loop = [], asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as threads:
        task = loop.run_in_executor(threads, ours.encode, text)
        while not task.done():
            before = loop.time()
            await asyncio.sleep(0.002)
            gaps.append(loop.time() - before)
        assert len(await task) > 50_000
    assert max(gaps) < 0.1, f"the loop stood still for {max(gaps):.3f} s"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json"),
        ({"tokenizer.json": None, "tokenizer_config.json": "["}, "tokenizer_config.json"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "tokenizer_config.json"),
        ({"tokenizer.json": None, "chat_template.jinja": "{% if %}"}, "template"),
    ],
)
def test_broken_directories_name_the_file(tmp_path, files, named):
    for name, content in files.items():
        if content is None:
            Tokenizer.bytes_only()._backend.save(str(tmp_path / name))
        else:
            (tmp_path / name).write_text(content)
    with pytest.raises(StartupError, match=named):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("as_list", [True, False])
def test_template_in_the_configuration(tmp_path, as_list):
    source = "{{ eos_token }}{{ messages[0].content }}"
    Tokenizer.bytes_only()._backend.save(str(tmp_path / "tokenizer.json"))
    template = [{"name": "tool", "template": ""}, {"name": "default", "template": source}] if as_list else source
    config = {"eos_token": {"content": "!", "lstrip": False}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert bytes(Tokenizer.load(tmp_path).encode_chat(CHATS[0])) == b"!Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_templates_that_fail_are_the_clients_400(source):
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render(CHATS[0])
    assert caught.value.param == "messages"
