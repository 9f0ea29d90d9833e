"""A prefilld dies in the middle of a long prompt: what it delivered is kept, and only the rest is computed again."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.cluster import Cluster, running_cluster
from benchmarks.text import real_text

BODY = {"prompt": real_text(9000), "max_tokens": 12, "temperature": 0}


@pytest.fixture
def cluster(smollm2_dir, request) -> Iterator[Cluster]:
    num_prefillds, push = request.param
    decoded = {"fallback": {"local_prefill_tokens_per_s": 10_000}, "routing": {"push": push}}
    with running_cluster(smollm2_dir, num_prefillds=num_prefillds, decoded=decoded) as c:
        yield c


def killed_in_the_middle(cluster: Cluster, num_tokens: int) -> Any:
    """The answer to a request whose peer is killed once it has computed so many tokens."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(cluster.post, "/v1/completions", BODY, {"X-Prfaas-Timing": "1"})
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for prefilld in cluster.prefillds:
                if any(r["num_computed_tokens"] >= num_tokens for r in prefilld.ctl("requests")):
                    prefilld.kill()
                    return answer.result(120)
            time.sleep(0.02)
        pytest.fail(f"no prefilld computed {num_tokens} tokens")


@pytest.mark.parametrize(
    "cluster",
    [(1, "auto"), (2, "never"), (2, "always")],
    indirect=True,
    ids=["the rest here", "the rest at another", "the rest at another that gets what there is"],
)
def test_a_killed_peers_work_is_kept(cluster: Cluster) -> None:
    expected = cluster.post("/v1/completions", BODY, {"X-Prfaas-Route": "local"})["choices"][0]["text"]
    answer = killed_in_the_middle(cluster, 768)
    assert answer["choices"][0]["text"] == expected
    told = cluster.decoded.ctl("explain", answer["prfaas"]["request_id"])
    first, second = told["decisions"]
    num_uncached = first["terms"]["uncached_tokens"]
    assert first["kept_tokens"] >= 512
    assert "LinkLost" in first["failure"]
    assert second["terms"]["uncached_tokens"] == num_uncached - first["kept_tokens"]
    assert second["route"] == ("remote" if len(cluster.prefillds) == 2 else "local")
    metric = f"prfaas_kept_prompt_tokens_total {float(first['kept_tokens'])}"
    metrics = cluster.get("/metrics")
    assert metric in metrics
    if second["route"] == "remote":
        # Each row crossed once, but for what was under way when the first peer died.
        bytes_of_token = 30 * 2 * 3 * 64 * 4
        assert 0 <= told["report"]["raw_bytes"] - num_uncached * bytes_of_token < 512 * bytes_of_token
        assert bool(second["terms"].get("push_tokens")) == ("pushed_bytes" in second)
    if "pushed_bytes" in second:
        found = re.search(rf'prfaas_pushed_bytes_total{{peer="{second["peer"]}"}} (\S+)', metrics)
        assert found and float(found[1]) == second["pushed_bytes"]
        [other] = [p for p in cluster.prefillds if p.process is not None and p.process.poll() is None]
        with urllib.request.urlopen(f"http://127.0.0.1:{other.config['http']['port']}/metrics", timeout=10) as page:
            assert f"prfaas_pushed_prompt_tokens_total {float(first['kept_tokens'])}" in page.read().decode()
