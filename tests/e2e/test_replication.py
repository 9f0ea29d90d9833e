"""A prefix that many prompts share reaches a prefilld before anybody needs it there."""

from __future__ import annotations

import time

import pytest

from benchmarks.cluster import WITH_CACHE, Cluster, running_cluster

SHARED = [5 + n % 900 for n in range(700)]


@pytest.fixture
def cluster():
    fake = {"engine": {"backend": "fake"}, "fake": {"prefill_tokens_per_s": 4000, "window_layers": 3, "window": 128}}
    routing = {"routing": {"replicate_share": 1.0}}
    with running_cluster(None, decoded={**fake, **WITH_CACHE, **routing}, prefilld={**fake, **WITH_CACHE}) as c:
        yield c


def ask(c: Cluster, own: int, route: str, num_own: int = 60):
    body = {"prompt": [*SHARED, *range(own, own + num_own)], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return c.post("/v1/completions", body, {"X-Prfaas-Timing": "1", "X-Prfaas-Route": route})


def wait_for(c: Cluster, line: str) -> None:
    deadline = time.monotonic() + 30
    while line not in c.get("/metrics"):
        assert time.monotonic() < deadline, c.decoded.log_tail()
        time.sleep(0.2)


def test_a_hot_prefix_is_there_before_it_is_asked_for(cluster):
    for n in range(4):
        ask(cluster, 2000 + 100 * n, "local")
    wait_for(cluster, 'prfaas_replicated_tokens_total{peer="prefilld0"} ')
    pushed = [x for x in cluster.get("/metrics").splitlines() if x.startswith("prfaas_pushed_bytes_total{")]
    found = ask(cluster, 5000, "remote")
    told = cluster.decoded.ctl("explain", found["id"])
    assert (told["decisions"][0]["route"], told["decisions"][0]["terms"]["push_tokens"]) == ("remote", 0)
    assert found["prfaas"]["uncached_tokens"] < 130
    assert [x for x in cluster.get("/metrics").splitlines() if x.startswith("prfaas_pushed_bytes_total{")] == pushed
    assert ask(cluster, 5000, "local")["choices"] == found["choices"]
    # The same point again is nothing to send.
    time.sleep(2.5)
    assert 'prfaas_replications_total{peer="prefilld0",result="ok"} 1.0' in cluster.get("/metrics")
