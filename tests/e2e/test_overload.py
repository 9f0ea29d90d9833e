"""Five times as many requests as can be served: who is served, who is refused and how, and that nothing is left behind.

How fast is measured by benchmarks/overload.py; here only outcomes, counts and shares are looked at.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster, running_cluster
from benchmarks.overload import KEYS, SHARES, config, find_capacity, metrics, overload

DEADLINE_S = 3.0


def post(c: Cluster, body: dict[str, Any], **headers: str) -> tuple[int, Any, Any]:
    """Status, headers and body."""
    named = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    request = urllib.request.Request(c.url + "/v1/completions", json.dumps(body).encode(), named)
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as e:
        response = e
    with response:
        return response.status, response.headers, json.load(response)


def test_overload_is_served_in_shares_and_refused_cleanly(tmp_path: Path) -> None:
    with running_cluster(None, num_prefillds=0, decoded=config(DEADLINE_S, tmp_path, is_fake=True)) as c:
        capacity = asyncio.run(find_capacity(c, 4.0))
        before = metrics(c)
        run = asyncio.run(overload(c, 5 * capacity, 10.0))
        after = metrics(c)
        kinds = run.kinds
        assert kinds["ok"] + kinds["refused"] == len(run.outcomes), f"every one has one clean outcome: {kinds}"
        assert kinds["refused"] > kinds["ok"] > 0

        def rise(name: str) -> int:
            return int(sum(after[key] - before[key] for key in after if key.startswith(name)))

        assert rise("prfaas_shed_total") == kinds["refused"], "one labelled counter for each refusal"
        assert rise("prfaas_requests_total") == len(run.outcomes)
        assert rise('prfaas_slo_requests_total{class="high",result="met",target="ttft"}') == len(run.of("ok", "high"))
        assert rise('prfaas_slo_requests_total{class="low",result="met",target="ttft"}') == len(run.of("ok", "low"))
        assert run.service_share("low") > 0.75 * SHARES["low"], "it is sure of a fifth; a run this short has noise"
        assert run.service_share("high") > run.service_share("low")
        assert all(Counter(o.key for o in run.of("ok"))[key] for key in KEYS), "the greedy key leaves room for others"
        assert run.max_reserved_bytes <= after["prfaas_max_state_bytes"]
        status = c.decoded.ctl("status")
        assert (status["num_running"], status["num_queued"], status["admitted_state_bytes"]) == (0, 0, 0)
        assert [row["class"] for row in status["classes"]] == ["high", "low"]
        log = c.decoded.log_path.read_text()
        assert "Traceback" not in log


def test_a_full_queue_takes_the_small_and_refuses_the_large(tmp_path: Path) -> None:
    """Also requirement A4: the limits hold while one runs for long."""
    slow = {"engine": {"backend": "fake"}, "fake": {"prefill_tokens_per_s": 0, "decode_tokens_per_s": 5}}
    limits = {"max_running_requests": 1, "max_queued_requests": 4, "large_prompt_tokens": 100, "large_queue_share": 0.2}
    long = {"prompt": [5] * 10, "max_tokens": 500, "ignore_eos": True, "stream": True}

    async def scene(c: Cluster) -> None:
        tasks = []
        for num in range(3):
            tasks.append(asyncio.create_task(asyncio.to_thread(until_cut, c, long)))
            await asyncio.to_thread(wait_for, c, 1, num)
        large = await asyncio.to_thread(post, c, {"prompt": [5] * 101, "max_tokens": 1})
        assert (large[0], large[2]["error"]["gate"]) == (429, "large_prompt")
        assert large[2]["error"]["setting"] == "admission.large_prompt_tokens"
        small = asyncio.create_task(asyncio.to_thread(until_cut, c, long))
        await asyncio.to_thread(wait_for, c, 1, 3)
        c.decoded.stop()
        await asyncio.gather(*tasks, small)

    with running_cluster(None, num_prefillds=0, decoded={**slow, "admission": limits, "drain": {"timeout": "1s"}}) as c:
        asyncio.run(scene(c))


def until_cut(c: Cluster, body: dict[str, Any]) -> None:
    try:
        request = urllib.request.Request(
            c.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
    except (urllib.error.URLError, OSError):
        pass


def wait_for(c: Cluster, num_running: int, num_queued: int) -> None:
    ends_at = time.monotonic() + 20
    while (status := c.decoded.ctl("status"))["num_running"] != num_running or status["num_queued"] != num_queued:
        assert time.monotonic() < ends_at, status
        time.sleep(0.05)


def test_classes_deadlines_and_requests_of_a_live_daemon(tmp_path: Path) -> None:
    keys = tmp_path / "bound.keys"
    keys.write_text("plain\nbulk low\n")
    keys.chmod(0o600)
    settings = config(60.0, tmp_path, is_fake=True) | {"http": {"api_key_file": str(keys)}}
    with running_cluster(None, num_prefillds=0, decoded=settings) as c:
        body = {"prompt": [5] * 10, "max_tokens": 2}
        auth = {"Authorization": "Bearer plain"}
        assert post(c, body, **auth, X_Prfaas_Class="high")[0] == 200
        status, _, answer = post(c, body, **auth, X_Prfaas_Class="gold")
        assert (status, answer["error"]["param"]) == (400, "X-Prfaas-Class")
        assert "the classes of this server are low, high" in answer["error"]["message"]
        assert post(c, body, Authorization="Bearer bulk", X_Prfaas_Class="high")[0] == 403
        assert post(c, body, Authorization="Bearer bulk")[0] == 200
        late = {"prompt": [5] * 8000, "max_tokens": 2}  # a second at 8,000 tokens a second
        status, headers, answer = post(c, late, **auth, X_Prfaas_Deadline="0.2")
        error = answer["error"]
        assert (status, error["gate"], error["setting"]) == (503, "deadline", "X-Prfaas-Deadline")
        assert error["limit"] == 0.2 and int(headers["Retry-After"]) >= 1
        c.decoded.config["admission"]["classes"] = [{"name": "low", "priority": 0, "share": 0.5}]
        c.decoded.write_config()
        changed = c.decoded.ctl("reload")["changed"]
        assert any("admission.classes" in line for line in changed)
        assert post(c, body, **auth, X_Prfaas_Class="high")[0] == 400
        keys.write_text("plain\nbulk gone\n")
        with pytest.raises(Exception, match="exit status 1"):
            c.decoded.ctl("reload")
        keys.write_text("plain low\nbulk\n")
        assert "of another class" in " ".join(c.decoded.ctl("reload")["changed"])
