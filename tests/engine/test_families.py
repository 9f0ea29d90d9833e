"""Model families on tiny random weights: the engine equals transformers' generate, or refuses at start-up."""

from __future__ import annotations

import pytest
import torch

from common.engine.runner import Runner, RunnerOptions
from common.errors import StartupError

WINDOW = {"sliding_window": 16}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {f"linear_{n}": v for n, v in [("num_value_heads", 4), ("num_key_heads", 2), ("key_head_dim", 16)]}
SERVED = {
    "Llama": ({}, "ffff"),
    "Mistral": (WINDOW, "wwww"),
    "Qwen2": (WINDOW | {"use_sliding_window": True, "max_window_layers": 2}, "ffww"),
    "Qwen3": ({}, "ffff"),
    "Gemma2": (WINDOW, "wfwf"),
    "Cohere2": (WINDOW, "wwwf"),
    "Granite": ({}, "ffff"),
    "Qwen3Moe": (MOE | {"num_experts": 4}, "ffff"),
}
REFUSED = {
    "GptOss": (WINDOW | MOE | {"num_local_experts": 4}, "layer 0 .*s_aux"),
    "Llama4Text": ({"attention_chunk_size": 16}, "layer 0 is of type chunked_attention"),
    "Qwen3Next": (
        MOE | LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 32, "linear_value_head_dim": 16},
        "layer 0 is of type linear_attention",
    ),
    "Bloom": ({}, "other logits"),
}


def generate(model, prompt, num_tokens=8):
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", SERVED)
async def test_equals_generate(tools, family):
    extra, kinds = SERVED[family]
    model = tools.tiny_model(family, **extra)
    backend = tools.tiny_backend(model, 20, token_budget=7)
    await backend.start()
    try:
        assert "".join(s.kind[0] for s in backend.info.layout.states) == kinds
        for length in (1, 16, 17, 41):
            prompt = tools.prompt(length)
            out = await tools.local(backend, tools.request(prompt, max_tokens=8))
            assert tools.ids(out) == generate(model, prompt), length
    finally:
        await backend.close()


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_carried_is_refused_by_layer(tools, family):
    extra, message = REFUSED[family]
    with pytest.raises(StartupError, match=message):
        Runner(tools.loaded(tools.tiny_model(family, **extra)), RunnerOptions())


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
