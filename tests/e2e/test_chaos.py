"""Requests offloaded through a network that does everything networks do: right tokens or an honest error, nothing left.

200 requests by default, 2,000 with the long lists.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from benchmarks.cluster import Cluster, running_cluster
from benchmarks.load import Job, run_load
from benchmarks.text import real_text
from benchmarks.transport.faultproxy import FAULTS, FaultProxy

CONCURRENCY = 8
LINKS = {"data_links": 3, "heartbeat": "200ms", "reconnect_min": "20ms", "reconnect_max": "200ms"}


@pytest.fixture
def harmed(smollm2_dir: Path, request):
    """A cluster whose traffic passes the proxy, and the proxy."""
    settings = {
        "links": LINKS,
        "stream": {"lease": "3s", "progress_timeout": "5s"},
        "routing": {"threshold_tokens": 40},
        "fallback": {"local_prefill_tokens_per_s": 100_000},
    }
    own = {"links": LINKS, "stream": settings["stream"]}
    with running_cluster(smollm2_dir, decoded=settings, prefilld=own) as cluster:
        proxy = FaultProxy(cluster.prefillds[0].config["listen"]["port"], seed=11)
        port = proxy.start()
        config = cluster.decoded.config
        config["peers"] = [{"name": "far", "address": f"127.0.0.1:{port}"}]
        cluster.decoded.write_config()
        cluster.decoded.ctl("reload")
        wait_for_peer(cluster)
        yield cluster, proxy
        proxy.stop()


def wait_for_peer(cluster: Cluster, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if [p["state"] for p in cluster.decoded.ctl("peers")] == ["ready"]:
            return
        time.sleep(0.1)
    pytest.fail(f"the peer did not come back: {cluster.decoded.ctl('peers')}")


def descriptors(cluster: Cluster) -> list[int]:
    pids = [cluster.decoded.pid, cluster.prefillds[0].pid]
    return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]


def metric(text: str, name: str) -> float:
    """Sum over all labels."""
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


async def harm(proxy: FaultProxy, rng: random.Random, stop: asyncio.Event) -> None:
    """One fault after the other until told to stop."""
    while not stop.is_set():
        proxy.harm(rng.choice(FAULTS))
        await asyncio.sleep(rng.uniform(0.02, 0.2))


@pytest.mark.parametrize("num_requests", [200, pytest.param(2000, marks=pytest.mark.slow)])
async def test_faults_of_every_kind(harmed, num_requests: int) -> None:
    cluster, proxy = harmed
    rng = random.Random(3)
    bodies = [
        {"prompt": real_text(rng.randint(250, 1200), skip=900 * i), "max_tokens": 4, "temperature": 0} for i in range(8)
    ]
    local = {"X-Prfaas-Route": "local"}
    jobs = []
    for body in bodies:
        answer = await asyncio.to_thread(cluster.post, "/v1/completions", body, local)
        jobs.append(Job(body, answer["choices"][0]["text"]))
    before, stop = descriptors(cluster), asyncio.Event()
    harming = asyncio.create_task(harm(proxy, rng, stop))
    async with asyncio.timeout(60 + num_requests):
        result = await run_load(cluster.url, [rng.choice(jobs) for _ in range(num_requests)], CONCURRENCY)
    stop.set()
    await harming
    print(f"faults {dict(proxy.counts)}, outcomes {dict(result.kinds)}, routes {dict(result.routes)}")
    assert sum(result.kinds.values()) == num_requests
    assert set(result.kinds) <= {"ok", "refused"}, result.outcomes
    assert result.kinds["ok"] > 0.95 * num_requests
    assert result.routes["remote"] > 0.2 * num_requests
    assert min(proxy.counts[fault] for fault in FAULTS) > 0
    await asyncio.to_thread(nothing_is_left, cluster, before)


def nothing_is_left(cluster: Cluster, before: list[int]) -> None:
    wait_for_peer(cluster)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        held = [sum(d.ctl("status")["state_bytes"].values()) for d in (cluster.decoded, cluster.prefillds[0])]
        now = descriptors(cluster)
        if held == [0, 0] and all(a <= b + 4 for a, b in zip(now, before, strict=True)):
            break
        time.sleep(0.2)
    else:
        pytest.fail(f"state {held}, descriptors {now}, before {before}")
    here = cluster.get("/metrics")
    http = cluster.prefillds[0].config["http"]
    there = urlopen(f"http://{http['host']}:{http['port']}/metrics", timeout=10).read().decode()
    for text in (here, there):
        assert metric(text, "prfaas_links_lost_total") > 0  # cuts, half-closed and silent connections
    assert metric(here, "prfaas_link_faults_total") + metric(here, "prfaas_offload_failures_total") > 0
    assert metric(there, "prfaas_handshakes_failed_total") > 0  # duplicated connections
    answer = cluster.post("/v1/completions", {"prompt": real_text(800), "max_tokens": 2}, {"X-Prfaas-Timing": "1"})
    assert answer["prfaas"]["route"] == "remote"
