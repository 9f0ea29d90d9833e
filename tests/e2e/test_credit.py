"""Eight long prompts with credit smaller than one request's state all finish."""

from __future__ import annotations

from benchmarks.cluster import running_cluster
from benchmarks.load import Job, run_load
from benchmarks.text import real_text


async def test_small_credit(smollm2_dir):
    # One prompt of about 700 tokens has 32 MB of float32 state.
    stream = {"credit_bytes": "4MiB", "max_staged_bytes": "4MiB"}
    with running_cluster(smollm2_dir, decoded={"stream": stream}, prefilld={"stream": stream}) as cluster:
        bodies = [{"prompt": real_text(3000, skip=3000 * i), "max_tokens": 4, "temperature": 0} for i in range(2)]
        local = {"X-Prfaas-Route": "local"}
        expected = [cluster.post("/v1/completions", b, local)["choices"][0]["text"] for b in bodies]
        jobs = [Job({**bodies[i % 2], "stream": i > 3}, expected[i % 2]) for i in range(8)]
        cluster.decoded.ctl("threshold", "100")
        result = await run_load(cluster.url, jobs, 8)
        assert result.kinds == {"ok": 8}, result.outcomes
        assert result.routes == {"remote": 8}
