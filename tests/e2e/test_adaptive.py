"""routing.mode = "adaptive" with a real engine: the threshold until speeds are known, then predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cluster import running_cluster


@pytest.mark.model
def test_adaptive_predicts_once_both_sides_are_known(smollm2_dir: Path):
    with running_cluster(smollm2_dir, decoded={"routing": {"mode": "adaptive", "threshold_tokens": 200}}) as c:
        c.wait_peers()

        def ask(num_tokens: int):
            body = {"prompt": [100 + n % 1000 for n in range(num_tokens)], "max_tokens": 2, "ignore_eos": True}
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
