"""Either daemon SIGKILLed at random moments under load: one outcome per request, no wrong token, offload comes back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import aiohttp
import pytest

from benchmarks.cluster import Cluster, running_cluster
from benchmarks.load import Job, LoadResult, run_load
from benchmarks.text import real_text

NUM_REQUESTS = 200
CONCURRENCY = 8
HEARTBEAT_S = 2.0


@pytest.fixture(scope="module")
def busy_cluster(smollm2_dir):
    decoded = {"routing": {"threshold_tokens": 60}, "fallback": {"local_prefill_tokens_per_s": 300}}
    with running_cluster(smollm2_dir, decoded=decoded) as c:
        yield c


@pytest.fixture(scope="module")
def jobs(busy_cluster: Cluster) -> list[Job]:
    """A few prompts of different lengths with their right answers, computed without any peer."""
    rng = random.Random(5)
    kinds = []
    for i in range(10):
        prompt = real_text(rng.randint(100, 900), skip=1500 * i)
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
        answer = busy_cluster.post("/v1/completions", body, {"X-Prfaas-Route": "local"})
        kinds.append((body, answer["choices"][0]["text"]))
    jobs = []
    for i in range(NUM_REQUESTS):
        body, expected = rng.choice(kinds)
        jobs.append(Job({**body, "stream": bool(i % 2)}, expected))
    return jobs


async def kill_and_restart(daemon, rng: random.Random, stop: asyncio.Event) -> int:
    """Until told to stop: let it live for a while, kill it, start it again."""
    num_kills = 0
    while not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), rng.uniform(1, 4))
        except TimeoutError:
            await asyncio.to_thread(daemon.kill)
            num_kills += 1
            daemon.start()
            await asyncio.to_thread(daemon.wait_ready)
    return num_kills


async def load_with_kills(cluster: Cluster, daemon, jobs: list[Job], seed: int, gate=None) -> tuple[LoadResult, int]:
    stop = asyncio.Event()
    killer = asyncio.create_task(kill_and_restart(daemon, random.Random(seed), stop))
    result = await run_load(cluster.url, jobs, CONCURRENCY, gate)
    stop.set()
    num_kills = await killer
    print(f"{num_kills} kills: {dict(result.kinds)}, routes {dict(result.routes)}")
    return result, num_kills


async def wait_baseline(cluster: Cluster) -> None:
    """State memory of both daemons goes back to nothing."""
    deadline = time.monotonic() + 35
    while time.monotonic() < deadline:
        held = [sum((await asyncio.to_thread(d.ctl, "status"))["state_bytes"].values()) for d in cluster.daemons]
        if held == [0, 0]:
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"state bytes still held: {held}")


LONG = pytest.param(NUM_REQUESTS, marks=pytest.mark.slow)


@pytest.mark.parametrize("num_requests", [80, LONG])
async def test_prefilld_killed(busy_cluster, jobs, num_requests):
    pid = busy_cluster.decoded.pid
    result, num_kills = await load_with_kills(busy_cluster, busy_cluster.prefillds[0], jobs[:num_requests], seed=1)
    assert num_kills >= 2
    assert len(result.outcomes) == num_requests
    assert set(result.kinds) <= {"ok", "error"}, result.details("wrong") + result.details("broken")
    assert result.routes["remote"] > 0
    assert busy_cluster.decoded.pid == pid
    assert busy_cluster.decoded.process.poll() is None
    await wait_baseline(busy_cluster)


async def test_offload_resumes_within_two_heartbeats(busy_cluster, jobs):
    prefilld = busy_cluster.prefillds[0]
    await asyncio.to_thread(prefilld.kill)
    prefilld.start()
    await asyncio.to_thread(prefilld.wait_ready)
    ready_at = time.monotonic()
    await asyncio.to_thread(busy_cluster.wait_peers, 30)
    took = time.monotonic() - ready_at
    print(f"offload possible {took:.2f} s after READY")
    assert took <= 2 * HEARTBEAT_S
    answer = busy_cluster.post("/v1/completions", jobs[0].body | {"stream": False}, {"X-Prfaas-Timing": "1"})
    assert answer["prfaas"]["route"] == "remote"


@pytest.mark.parametrize("num_requests", [40, LONG])
async def test_decoded_killed(busy_cluster, jobs, num_requests):
    decoded = busy_cluster.decoded

    async def up() -> None:
        """A client that knows the server restarts: it asks /readyz before it sends."""
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(busy_cluster.url + "/readyz") as reply:
                        if reply.status == 200:
                            return
                await asyncio.sleep(0.1)

    result, num_kills = await load_with_kills(busy_cluster, decoded, jobs[:num_requests], seed=2, gate=up)
    assert num_kills >= 1
    assert len(result.outcomes) == num_requests
    assert set(result.kinds) <= {"ok", "error", "broken"}, result.details("wrong")
    assert result.kinds["broken"] <= CONCURRENCY * num_kills
    await wait_baseline(busy_cluster)
