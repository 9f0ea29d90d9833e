"""bfloat16 through both daemons: local and remote agree until a step whose top two are closer than rounding noise.

The two sides cut the prompt differently (chunks of 256 and 96 tokens) and decode in different company, so their sums
round differently; step, gap and noise are printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster, running_cluster
from tests.e2e.test_exact import ask, check_routes, prompts_of

TOP = 5


def steps(answer: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Each step's token and its most probable alternatives."""
    logprobs = answer["choices"][0]["logprobs"]
    return list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


def compare(name: str, local: dict[str, Any], remote: dict[str, Any]) -> None:
    """Fails when the two differ at a step whose gap is larger than the noise measured up to that step."""
    noise = 0.0
    num_prompt = local["usage"]["prompt_tokens"]
    for step, ((mine, ours), (other, theirs)) in enumerate(zip(steps(local), steps(remote), strict=True)):
        noise = max([noise, *(abs(ours[t] - theirs[t]) for t in ours.keys() & theirs.keys())])
        if mine != other:
            first, second = sorted(ours.values())[:-3:-1]
            print(f"{name}, prompt {num_prompt}: step {step}, top-2 gap {first - second:.4g}, noise {noise:.4g}")
            assert first - second <= 2 * noise
            return
    print(f"{name}, prompt {num_prompt}: equal for all {len(steps(local))} steps, noise {noise:.4g}")


async def check(model_dir: Path, lengths: list[int], num_output: int, **engine: Any) -> None:
    with running_cluster(
        model_dir, decoded={"engine": engine}, prefilld={"engine": {**engine, "chunk_tokens": 96}}
    ) as cluster:
        await compare_routes(cluster, model_dir, lengths, num_output, " ".join(engine.values()))


async def compare_routes(cluster: Cluster, model_dir: Path, lengths: list[int], num_output: int, what: str) -> None:
    prompts = prompts_of(model_dir, lengths)
    options = {"max_tokens": num_output, "logprobs": TOP}
    local = await ask(cluster, prompts, "local", **options)
    # In two halves: another batch than the local one's.
    middle = len(prompts) // 2
    halves = [await ask(cluster, part, "remote", **options) for part in (prompts[:middle], prompts[middle:])]
    remote = [*halves[0], *halves[1]]
    check_routes(local, prompts, "local")
    check_routes(remote, prompts, "remote")
    for a, b in zip(local, remote, strict=True):
        compare(f"{model_dir.name} {what}", a, b)


async def test_smollm2_bf16(smollm2_dir):
    await check(smollm2_dir, [40, 200], 12, dtype="bfloat16")


@pytest.mark.slow
async def test_smollm2_bf16_long(smollm2_dir):
    await check(smollm2_dir, [2, 30, 97, 200, 257, 300, 520, 700], 64, dtype="bfloat16")


@pytest.mark.slow
async def test_gemma3_bf16_long(gemma3_dir):
    await check(gemma3_dir, [2, 30, 97, 200, 257, 300, 520, 700], 64, dtype="bfloat16")


@pytest.mark.slow
async def test_gemma3_bf16_state_long(gemma3_dir):
    await check(gemma3_dir, [2, 30, 97, 200, 257, 300, 520, 700], 64, dtype="float32", kv_dtype="bfloat16")
