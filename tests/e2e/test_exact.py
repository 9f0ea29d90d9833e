"""remote == local == transformers generate, greedy, float32, alone and in a mixed batch; sampling and logprobs too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.cluster import Cluster
from benchmarks.text import real_text

NUM_OUTPUT = 64
# Chunk (256) and window (512) boundaries and their neighbours; a chunk covers the n-1 tokens before the last.
SHORT_LIST = [1, 2, 256, 257, 258, 512, 513, 1200]
LONG_LIST = [1, 2, 3, 5, 16, 63, 64, 65, 128, 200, 255, 256, 257, 258, 259, 300, 400, 510, 511, 512, 513, 514, 515, 600]
LONG_LIST += [767, 768, 769, 770, 1000, 1023, 1024, 1025, 1026, 1500, 1537, 2000, 2049, 3000, 3585, 4000]


def prompts_of(model_dir: Path, lengths: list[int]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    ids = tokenizer(real_text(40_000))["input_ids"]
    return [ids[37 * i : 37 * i + n] for i, n in enumerate(lengths)]


def generate(model: Any, tokenizer: Any, prompt: list[int]) -> str:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, repetition_penalty=1.0,
        max_new_tokens=NUM_OUTPUT,
    )  # fmt: skip
    return tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)


def reference(model_dir: Path, prompts: list[list[int]]) -> list[str]:
    """What transformers' own generate makes of the same weights."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    torch.set_num_threads(2)  # the daemons wait meanwhile
    try:
        return [generate(model, tokenizer, prompt) for prompt in prompts]
    finally:
        torch.set_num_threads(1)


async def ask(cluster: Cluster, prompts: list[list[int]], route: str, **body: Any) -> list[dict[str, Any]]:
    """All prompts at once; answers in order."""
    defaults = {"max_tokens": NUM_OUTPUT, "temperature": 0}
    headers = {"X-Prfaas-Route": route, "X-Prfaas-Timing": "1"}
    timeout = aiohttp.ClientTimeout(total=1200)
    async with aiohttp.ClientSession(cluster.url, timeout=timeout) as session:

        async def one(prompt: list[int]) -> dict[str, Any]:
            payload = {"prompt": prompt, **defaults, **body}
            async with session.post("/v1/completions", json=payload, headers=headers) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
                return answer

        return await asyncio.gather(*(one(p) for p in prompts))


def texts(answers: list[dict[str, Any]]) -> list[str]:
    return [a["choices"][0]["text"] for a in answers]


def check_routes(answers: list[dict[str, Any]], prompts: list[list[int]], route: str) -> None:
    for answer, prompt in zip(answers, prompts, strict=True):
        expected = route if len(prompt) > 1 else "local"
        assert answer["prfaas"]["route"] == expected, answer["prfaas"]


async def check_exact(cluster: Cluster, model_dir: Path, lengths: list[int]) -> None:
    prompts = prompts_of(model_dir, lengths)
    expected = reference(model_dir, prompts)
    for route in ("local", "remote"):
        batch = await ask(cluster, prompts, route)
        check_routes(batch, prompts, route)
        assert dict(zip(lengths, texts(batch), strict=True)) == dict(zip(lengths, expected, strict=True)), route
    for n in (1, 3, -2):
        alone = await ask(cluster, [prompts[n]], "remote")
        assert texts(alone) == [expected[n]]


async def check_sampling(cluster: Cluster, model_dir: Path) -> None:
    prompts = prompts_of(model_dir, [300, 700])
    options = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 7, "logprobs": 5, "n": 2}
    local = await ask(cluster, prompts, "local", **options)
    remote = await ask(cluster, prompts, "remote", **options)
    for a, b in zip(local, remote, strict=True):
        assert [c["text"] for c in a["choices"]] == [c["text"] for c in b["choices"]]
        assert a["choices"][0]["text"] != a["choices"][1]["text"]
        for x, y in zip(a["choices"], b["choices"], strict=True):
            assert x["logprobs"]["tokens"] == y["logprobs"]["tokens"]
            assert y["logprobs"]["token_logprobs"] == pytest.approx(x["logprobs"]["token_logprobs"], abs=1e-3)


async def test_smollm2_exact(cluster, smollm2_dir):
    await check_exact(cluster, smollm2_dir, SHORT_LIST)


async def test_smollm2_sampling(cluster, smollm2_dir):
    await check_sampling(cluster, smollm2_dir)


async def test_gemma3_exact(gemma_cluster, gemma3_dir):
    await check_exact(gemma_cluster, gemma3_dir, SHORT_LIST)


async def test_gemma3_sampling(gemma_cluster, gemma3_dir):
    await check_sampling(gemma_cluster, gemma3_dir)


@pytest.mark.slow
async def test_smollm2_exact_long_list(cluster, smollm2_dir):
    await check_exact(cluster, smollm2_dir, LONG_LIST)


@pytest.mark.slow
async def test_gemma3_exact_long_list(gemma_cluster, gemma3_dir):
    await check_exact(gemma_cluster, gemma3_dir, LONG_LIST)
