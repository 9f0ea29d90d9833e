"""routing.mode = "adaptive" with a real engine: the threshold until speeds are known, then predictions; replayed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.cluster import WITH_CACHE, running_cluster
from common.policy.adaptive import Weights
from common.policy.routing import Rules, decide
from common.policy.views import replayed


@pytest.mark.model
def test_adaptive_predicts_once_both_sides_are_known(smollm2_dir: Path, tmp_path: Path):
    trace = tmp_path / "trace"
    routing = {"routing": {"mode": "adaptive", "threshold_tokens": 200}, "log": {"trace_file": str(trace)}}
    with running_cluster(smollm2_dir, decoded={**routing, **WITH_CACHE}, prefilld=WITH_CACHE) as c:
        c.wait_peers()

        def ask(num_tokens: int):
            first = random.randrange(100, 40_000)  # nothing of it is cached
            body = {"prompt": [first, *range(100, 99 + num_tokens)], "max_tokens": 2, "ignore_eos": True}
            told = c.post("/v1/completions", body, {"X-Prfaas-Timing": "1"})
            return told["prfaas"], c.decoded.ctl("explain", told["id"])["decisions"][-1]

        reasons = [ask(n)[0]["reason"] for n in (100, 400)]
        assert reasons[:1] == ["below_threshold"]
        for _ in range(40):
            facts, decision = ask(150)
            if facts["reason"] == "adaptive":
                break
        assert facts["reason"] == "adaptive"
        alternatives = decision["terms"]["alternatives"]
        assert set(alternatives) == {"local", "prefilld0"}
        soonest = min(alternatives, key=lambda name: alternatives[name]["ttft_s"])
        assert (decision["peer"] or "local") == soonest
        assert decision["terms"]["predicted_ttft_s"] == alternatives[soonest]["ttft_s"]
        long = list(range(200, 1300))
        for more in (0, 200, 300):
            body = {"prompt": [*long, *range(5000, 5000 + more)], "max_tokens": 2, "ignore_eos": True}
            c.post("/v1/completions", body)
    check_replay(trace)


def check_replay(trace: Path) -> None:
    """Every decision of the run is the same when its facts are decided again."""
    routed = [e for e in map(json.loads, trace.read_text().splitlines()) if e["event"] == "routed"]
    assert len(routed) > 5 and {e["decision"]["reason"] for e in routed} >= {"below_threshold", "adaptive"}
    assert any(e["facts"]["request"]["num_cached_tokens"] for e in routed)
    for each in routed:
        rules = Rules(**{**each["rules"], "weights": Weights(**each["rules"]["weights"])})
        again = decide(*replayed(each["facts"]), rules)
        assert {name: getattr(again, name) for name in each["decision"]} == each["decision"]
