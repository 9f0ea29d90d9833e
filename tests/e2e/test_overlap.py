"""The transfer runs while the prompt is still being computed: by the trace on loopback, by the clock over a WAN."""

from __future__ import annotations

import json
import time

import pytest

from benchmarks.cluster import running_cluster
from benchmarks.overlap import overlap_share, run
from benchmarks.text import real_text


def test_first_layers_are_on_the_socket_before_the_last_layer_has_run(smollm2_dir, tmp_path):
    trace = tmp_path / "trace"
    with running_cluster(smollm2_dir, prefilld={"log": {"trace_file": str(trace)}}) as cluster:
        body = {"prompt": real_text(12_000), "max_tokens": 1}
        answer = cluster.post("/v1/completions", body, {"X-Prfaas-Timing": "1"})
        assert answer["prfaas"]["route"] == "remote"
        assert answer["usage"]["prompt_tokens"] > 2000
        time.sleep(1.0)
        events = [json.loads(line) for line in trace.read_text().splitlines()]
    num_chunks = sum(e["event"] == "chunk_done" for e in events)
    share = overlap_share(events)
    print(f"{share:.0%} of {num_chunks} chunks")
    assert num_chunks >= 8
    assert share >= 0.9


@pytest.mark.wan
def test_ttft_on_a_narrow_link_is_near_the_bound_of_a_perfect_pipeline(smollm2_dir):
    result = run(smollm2_dir, rate_mbit=50, rtt_ms=20, num_tokens=3000)
    print("\n".join(result.lines()))
    assert result.ratio <= 1.10
