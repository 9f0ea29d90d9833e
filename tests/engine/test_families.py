"""Every model family on tiny random weights: remote == local == transformers generate, or refused by name at start-up.

The remote side computes in other chunks than the local one; state crosses a real TCP connection. Lengths lie around
chunks (20 and 12 tokens), the window (16), convolution kernels (3, 4) and the blocks of linear attention (16, 64).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import torch

from common.engine.loader import check_loads
from common.engine.runner import Runner, RunnerOptions
from common.errors import StartupError
from common.layout import StateLayout
from tests.engine.families import FAMILIES, StateRow
from tests.engine.wire_pair import WirePair

SERVED = [name for name, family in FAMILIES.items() if not family.refused]
REFUSED = [name for name, family in FAMILIES.items() if family.refused]
QUICK = (1, 2, 5, 13, 17, 18, 21, 65, 66)
LISTED = (
    1,
    2,
    3,
    4,
    5,
    6,
    11,
    12,
    13,
    14,
    15,
    16,
    17,
    18,
    19,
    20,
    21,
    22,
    40,
    41,
    63,
    64,
    65,
    66,
    127,
    128,
    129,
    130,
    200,
)


def generate(model, prompt, num_tokens):
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@contextlib.asynccontextmanager
async def pair_of(tools, family: str, **options) -> AsyncIterator[WirePair]:
    """Two engines of one family with different chunks, joined by TCP; checked for leaks at the end."""
    model = FAMILIES[family].model()
    backends = [
        tools.tiny_backend(model, 20, token_budget=7, max_batch=32, **options),
        tools.tiny_backend(model, 12, segment_bytes=4096, **options),
    ]
    for backend in backends:
        await backend.start()
    try:
        async with WirePair(*backends) as pair:
            yield pair
            await tools.until_idle(*backends)
    finally:
        for backend in backends:
            await backend.close()


async def check_exact(tools, family: str, lengths, num_tokens: int) -> None:
    model = FAMILIES[family].model()
    requests = [tools.request(tools.prompt(n, seed=n), max_tokens=num_tokens) for n in lengths]
    expected = [await asyncio.to_thread(generate, model, r.prompt_tokens, num_tokens) for r in requests]
    async with pair_of(tools, family) as pair:
        for request, tokens in list(zip(requests, expected, strict=True))[:: max(1, len(lengths) // 6)]:
            assert tools.ids(await tools.local(pair.decoder, request)) == tokens, request.num_prompt_tokens
            assert tools.ids(await pair.remote(request)) == tokens, request.num_prompt_tokens
        ways = [pair.remote(r) if i % 2 else tools.local(pair.decoder, r) for i, r in enumerate(requests)]
        mixed = await asyncio.gather(*ways)
        assert [tools.ids(out) for out in mixed] == expected
        mixed = await asyncio.gather(*(pair.remote(r) for r in requests))
        assert [tools.ids(out) for out in mixed] == expected


@pytest.mark.parametrize("family", SERVED)
async def test_remote_equals_local_equals_generate(tools, family):
    await check_exact(tools, family, QUICK, 12)


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED)
async def test_remote_equals_local_equals_generate_long(tools, family):
    await check_exact(tools, family, LISTED, 64)


@pytest.mark.parametrize("family", SERVED)
async def test_samples_logprobs_and_choices_from_one_transfer(tools, family):
    request = tools.request(
        tools.prompt(50), num_choices=4, temperature=0.9, top_p=0.95, seed=11, logprobs=4, max_tokens=8
    )
    async with pair_of(tools, family) as pair:
        local, remote = await tools.local(pair.decoder, request), await pair.remote(request)
        assert len(pair.reports) == 1
    by_step = [sorted(o, key=lambda t: (t.choice, t.num_output_tokens)) for o in (local, remote)]
    assert len({tuple(tools.ids(local, choice)) for choice in range(4)}) > 1
    for a, b in zip(*by_step, strict=True):
        assert (a.choice, a.token_id) == (b.choice, b.token_id)
        assert a.logprob.logprob == pytest.approx(b.logprob.logprob, abs=1e-2)
        # Of two nearly equal alternatives either may come first.
        ours, theirs = dict(a.logprob.top), dict(b.logprob.top)
        assert sorted(ours.values()) == pytest.approx(sorted(theirs.values()), abs=1e-2)
        assert all(ours[t] == pytest.approx(theirs[t], abs=1e-2) for t in ours.keys() & theirs.keys())


def rows_of(layout: StateLayout) -> list[StateRow]:
    """A layout in the formulas' terms."""
    return [StateRow(s.kind, s.num_bytes(1) // 4, s.window) for s in layout.states]


def wire_bytes(rows: list[StateRow], num_tokens: int) -> int:
    """What must cross for a prompt: rows of every token, of the last window - 1 tokens, and fixed state once."""
    counts = {"full": num_tokens, "latent": num_tokens, "recurrent": 1}
    return sum(4 * r.elements * counts.get(r.kind, min(num_tokens, r.window - 1)) for r in rows)


@pytest.mark.parametrize("family", SERVED)
async def test_state_on_the_wire_is_what_the_configuration_says(tools, family):
    formula = FAMILIES[family].formula(FAMILIES[family].config())
    async with pair_of(tools, family) as pair:
        assert sorted(map(repr, rows_of(pair.decoder.info.layout))) == sorted(map(repr, formula))
        for length in (2, 18, 90):
            await pair.remote(tools.request(tools.prompt(length), max_tokens=1))
            assert pair.reports[-1].raw_bytes == wire_bytes(formula, length - 1), length


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_has_no_tensor_too_many(tmp_path, family):
    """Whatever names transformers saves under, the loader finds a place for every tensor."""
    FAMILIES[family].model().save_pretrained(tmp_path)
    check_loads(tmp_path)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_carried_is_refused(tools, family):
    with pytest.raises(StartupError, match=FAMILIES[family].refused):
        Runner(tools.loaded(FAMILIES[family].model()), RunnerOptions())


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("Llama4Text", {"attention_chunk_size": 16}, "layer 0 keeps a window of 16 but attends with one of 0"),
        ("Bloom", {}, "other logits"),
        ("Gemma3nText", {"layer_types": ["full_attention"] * 6, "layers": 6, "num_kv_shared_layers": 3}, "layer 3"),
    ],
)
def test_what_attends_otherwise_is_refused(tools, family, extra, message):
    with pytest.raises(StartupError, match=message):
        Runner(tools.loaded(tools.tiny_model(family, **extra)), RunnerOptions())


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("Qwen2", "ffww"), ("Qwen3", "ffff"), ("Gemma2", "wfwf"), ("Cohere2", "wwwf"), ("Granite", "ffff")],
)
async def test_further_families_equal_generate(tools, family, kinds):
    extra = {"sliding_window": 16} if "w" in kinds else {}
    if family == "Qwen2":
        extra |= {"use_sliding_window": True, "max_window_layers": 2}
    model = tools.tiny_model(family, **extra)
    backend = tools.tiny_backend(model, 20, token_budget=7)
    await backend.start()
    try:
        assert "".join(s.kind[0] for s in backend.info.layout.states) == kinds
        for length in (1, 16, 17, 41):
            prompt = tools.prompt(length)
            out = await tools.local(backend, tools.request(prompt, max_tokens=8))
            assert tools.ids(out) == generate(model, prompt, 8), length
    finally:
        await backend.close()


def test_longrope_context_ends_where_frequencies_would_switch(tools):
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    model = tools.tiny_model("Llama", rope_parameters=scaling)
    runner = Runner(tools.loaded(model), RunnerOptions())
    assert runner.facts.max_context == 64


@pytest.mark.parametrize("kv_dtype", ["int8", "float64"])
def test_unknown_kv_dtype_is_refused(tools, kv_dtype):
    with pytest.raises(StartupError, match="kv_dtype"):
        Runner(tools.loaded(tools.tiny_model("Llama")), RunnerOptions(kv_dtype=kv_dtype))
