"""A prefilld dies in the middle of a long prompt: what it delivered is kept, and only the rest is computed again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.cluster import Cluster, running_cluster
from benchmarks.text import real_text

BODY = {"prompt": real_text(9000), "max_tokens": 12, "temperature": 0}


@pytest.fixture
def cluster(smollm2_dir, request) -> Iterator[Cluster]:
    decoded = {"fallback": {"local_prefill_tokens_per_s": 10_000}}
    with running_cluster(smollm2_dir, num_prefillds=request.param, decoded=decoded) as c:
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


@pytest.mark.parametrize("cluster", [1, 2], indirect=True, ids=["the rest here", "the rest at another"])
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
    assert metric in cluster.get("/metrics")
    if second["route"] == "remote":
        # Each row crossed once, but for what was under way when the first peer died.
        bytes_of_token = 30 * 2 * 3 * 64 * 4
        assert told["report"]["raw_bytes"] == (num_uncached - first["kept_tokens"]) * bytes_of_token
