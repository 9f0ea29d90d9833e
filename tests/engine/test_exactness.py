"""Real weights (SmolLM2, Gemma 3): every route and batch gives transformers' tokens; bf16 up to rounding noise."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

MODELS = ["smollm2-135m-instruct", "gemma3-270m"]
pytestmark = pytest.mark.model
# Around the chunks of both sides (256 and 160) and around Gemma's window of 512.
QUICK = (1, 2, 161, 257, 513)
LISTED = (1, 2, 3, 159, 160, 161, 255, 256, 257, 320, 321, 510, 511, 512, 513, 514, 767, 768, 769, 1024, 1025, 1200)


def reference(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def generate(model, prompt, num_tokens):
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def text():
    """Token ids of a text with structure: repeated phrases and runs, so that outputs are not one token for ever."""
    rnd = random.Random(3)
    phrases = [[rnd.randrange(300, 20000) for _ in range(rnd.randrange(2, 9))] for _ in range(40)]
    out: list[int] = []
    while len(out) < 4200:
        out += rnd.choice(phrases)
    return out


def prompt_of(text, length):
    return tuple(text[length % 97 : length % 97 + length])


async def check(lab, tools, model_dir, text, lengths, num_tokens):
    decoder, source = await lab.backend(256, token_budget=64), await lab.backend(160)
    model = reference(model_dir)
    requests = [tools.request(prompt_of(text, n), max_tokens=num_tokens) for n in lengths]
    expected = [await asyncio.to_thread(generate, model, r.prompt_tokens, num_tokens) for r in requests]

    # Alone: a sample, since every prompt runs in the batch below too.
    for request, tokens in list(zip(requests, expected, strict=True))[:: max(1, len(requests) // 8)]:
        assert tools.ids(await tools.local(decoder, request)) == tokens, request.num_prompt_tokens
        assert tools.ids(await tools.remote(decoder, source, request)) == tokens, request.num_prompt_tokens
    ways = [tools.remote(decoder, source, r) if i % 2 else tools.local(decoder, r) for i, r in enumerate(requests)]
    together = await asyncio.gather(*ways)
    assert [tools.ids(out) for out in together] == expected
    await tools.until_idle(decoder, source)


@pytest.mark.parametrize("name", MODELS)
async def test_float32_equals_generate(make_lab, tools, model_dir, text, name):
    await check(make_lab(name), tools, model_dir(name), text, QUICK, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
async def test_float32_equals_generate_on_a_long_list(make_lab, tools, model_dir, text, name):
    rnd = random.Random(1)
    lengths = (*LISTED, *(rnd.randrange(1, 4001) for _ in range(17)), 4000)
    await check(make_lab(name), tools, model_dir(name), text, lengths, 64)


@pytest.mark.parametrize("name", MODELS)
async def test_seeded_samples_and_logprobs_are_equal_on_every_route(make_lab, tools, text, name):
    lab = make_lab(name)
    decoder, source = await lab.backend(256), await lab.backend(160)
    request = tools.request(
        prompt_of(text, 300), num_choices=3, temperature=0.8, top_p=0.95, seed=5, logprobs=3, max_tokens=6
    )
    local, remote = await tools.local(decoder, request), await tools.remote(decoder, source, request)
    for choice in range(3):
        assert tools.ids(local, choice) == tools.ids(remote, choice)
    ordered = [sorted(o, key=lambda t: (t.choice, t.num_output_tokens)) for o in (local, remote)]
    for a, b in zip(*ordered, strict=True):
        assert a.logprob.logprob == pytest.approx(b.logprob.logprob, abs=1e-3)
        assert [t for t, _ in a.logprob.top] == [t for t, _ in b.logprob.top]


async def test_prompt_logprobs_equal_transformers(make_lab, tools, model_dir, text):
    decoder = await make_lab(MODELS[0]).backend(256)
    prompt = prompt_of(text, 300)
    model = reference(model_dir(MODELS[0]))
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1)
    [found, *_] = await tools.local(decoder, tools.request(prompt, prompt_logprobs=1))
    for position, entry in enumerate(found.logprobs[1:], start=1):
        assert entry.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=2e-3)
        assert entry.top[0][0] == int(expected[position - 1].argmax())


def spread(outputs, others):
    """Largest difference of the same tokens' log probabilities."""
    tops = [(dict(a.logprob.top), dict(b.logprob.top)) for a, b in zip(outputs, others, strict=True)]
    return max(abs(mine[t] - theirs[t]) for mine, theirs in tops for t in mine.keys() & theirs.keys())


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [
        (MODELS[0], "bfloat16", ""),
        (MODELS[1], "float32", "bfloat16"),
        pytest.param(MODELS[1], "bfloat16", "", marks=pytest.mark.slow),
        pytest.param(MODELS[0], "float32", "bfloat16", marks=pytest.mark.slow),
        pytest.param(MODELS[0], "float32", "float16", marks=pytest.mark.slow),
    ],
)
async def test_low_precision_differs_only_below_rounding_noise(make_lab, tools, text, name, dtype, kv_dtype):
    lab = make_lab(name)
    decoder = await lab.backend(256, dtype=dtype, kv_dtype=kv_dtype)
    source = await lab.backend(24, dtype=dtype, kv_dtype=kv_dtype)
    request = tools.request(prompt_of(text, 70), max_tokens=10, logprobs=20)
    local = await tools.local(decoder, request)
    # In company, so that the batch differs as well as the chunks.
    company = [tools.local(decoder, tools.request(prompt_of(text, n), max_tokens=10)) for n in (3, 8)]
    remote, *_ = await asyncio.gather(tools.remote(decoder, source, request), *company)
    noise, same, first = 0.0, True, spread(local[:1], remote[:1])
    for step, (a, b) in enumerate(zip(local, remote, strict=True)):
        noise = max(noise, spread([a], [b]))
        if a.token_id != b.token_id:
            gap = a.logprob.top[0][1] - a.logprob.top[1][1]
            print(f"{name} {dtype} kv {kv_dtype or dtype}: step {step}, gap {gap:.4g}, noise {noise:.4g}")
            assert gap <= 2 * noise
            same = False
            break
    if same:
        print(f"{name} {dtype} kv {kv_dtype or dtype}: equal for {len(local)} steps, noise {noise:.4g}")
    if dtype == "float32":
        # Rows are rounded before they are used, so chunk boundaries only change on which side of a rounding boundary a
        # few values lie. What follows from one of them in the layers above is of the size of rounding itself, not more.
        exact = await tools.local(await lab.backend(256, dtype=dtype), request)
        effect = spread(local[:1], exact[:1])
        print(f"{name}: rounding itself changes the first step by {effect:.4g}, chunk boundaries {first:.4g}")
        assert first < 3 * effect
