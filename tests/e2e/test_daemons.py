"""Both daemons as processes with fake engines: routes, timing, verbs, drain, reload, overload, cancel. No model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from benchmarks.cluster import Cluster, Daemon, http_status, running_cluster
from common.request import Timing

FAST = {"engine": {"backend": "fake"}, "fake": {"prefill_tokens_per_s": 4000, "decode_tokens_per_s": 200}}
PARTS = tuple(part.name for part in fields(Timing) if part.name != "ttft_s")


def fake_cluster(num_prefillds: int = 1, decoded: dict[str, Any] | None = None, prefilld: dict[str, Any] | None = None):
    return running_cluster(
        None, num_prefillds=num_prefillds, decoded={**FAST, **(decoded or {})}, prefilld={**FAST, **(prefilld or {})}
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with fake_cluster() as c:
        yield c


def prompt(num_tokens: int, seed: int = 1) -> list[int]:
    return [3 + (seed * 7919 + i * 104729) % 200 for i in range(num_tokens)]


def complete(
    c: Cluster, num_tokens: int, max_tokens: int = 8, headers: dict[str, str] | None = None, **body: Any
) -> Any:
    payload = {"prompt": prompt(num_tokens), "max_tokens": max_tokens, "temperature": 0, "logprobs": 0, **body}
    return c.post("/v1/completions", payload, {"X-Prfaas-Timing": "1", **(headers or {})})


def tokens_of(answer: Any) -> list[str]:
    return answer["choices"][0]["logprobs"]["tokens"]


def test_threshold_decides_and_both_routes_give_the_same_tokens(cluster):
    short, long = complete(cluster, 1001), complete(cluster, 1002)
    assert (short["prfaas"]["route"], short["prfaas"]["reason"]) == ("local", "below_threshold")
    assert (long["prfaas"]["route"], long["prfaas"]["reason"]) == ("remote", "above_threshold")
    assert long["prfaas"]["peer"] == "prefilld0"
    assert long["prfaas"]["wire_bytes"] > 0
    local = complete(cluster, 1002, headers={"X-Prfaas-Route": "local"})
    assert tokens_of(local) == tokens_of(long)


def test_both_daemons_answer_alike_over_http(cluster):
    prefilld = cluster.prefillds[0].config["http"]
    urls = [cluster.url, f"http://{prefilld['host']}:{prefilld['port']}"]
    for path, status in {"/readyz": 200, "/version": 200, "/control/version": 200, "/nowhere": 404}.items():
        first, second = (fetch(url + path) for url in urls)
        assert first.status == second.status == status
        assert first.headers["Content-Type"].split(";")[0] == second.headers["Content-Type"].split(";")[0]
        assert first.data.keys() == second.data.keys()
        assert all(a.text == json.dumps(a.data, separators=(",", ":")) for a in (first, second))
        if status == 404:
            assert first.data == second.data
    assert fetch(urls[1] + "/readyz").data == {"is_ready": True, "why": "ready"}
    versions = [fetch(f"{url}/version").data for url in urls]
    assert [v.pop("daemon") for v in versions] == ["decoded", "prefilld"]
    assert versions[0] == versions[1]


def fetch(url: str) -> Any:
    try:
        response = urllib.request.urlopen(url, timeout=10)
    except urllib.error.HTTPError as e:
        response = e
    with response:
        text = response.read().decode()
        return SimpleNamespace(status=response.status, headers=response.headers, text=text, data=json.loads(text))


def test_timing_parts_add_up_to_the_clients_clock(cluster):
    for num_tokens in (500, 3000):
        for _ in range(3):
            sent_at = time.monotonic()
            answer = complete(cluster, num_tokens, max_tokens=1)
            seen_s = time.monotonic() - sent_at
            timing = answer["prfaas"]["timing"]
            assert sum(timing[p] for p in PARTS) == pytest.approx(timing["ttft_s"], rel=0.05)
            assert timing["ttft_s"] <= seen_s
            if timing["ttft_s"] >= 0.95 * seen_s:
                break
        else:
            pytest.fail(f"{num_tokens} tokens: parts {timing} against {seen_s:.3f} s at the client")


def test_threshold_verb_zero_sends_all_and_inf_none(cluster):
    ctl = cluster.decoded.ctl
    assert ctl("threshold", "0") == {"threshold_tokens": 0}
    assert complete(cluster, 2)["prfaas"]["route"] == "remote"
    assert complete(cluster, 1)["prfaas"]["reason"] == "nothing_to_compute"
    assert ctl("threshold", "inf") == {"threshold_tokens": "inf"}
    assert complete(cluster, 3000)["prfaas"]["route"] == "local"
    assert ctl("threshold", "1000") == {"threshold_tokens": 1000}
    with pytest.raises(subprocess.CalledProcessError):
        ctl("threshold", "-1")
    with pytest.raises(subprocess.CalledProcessError):
        ctl("threshold", "1e300")


def test_explain_prints_the_inequality_and_what_happened(cluster):
    answer = complete(cluster, 2000)
    told = cluster.decoded.ctl("explain", answer["prfaas"]["request_id"])
    assert told["decisions"][0]["terms"]["inequality"] == "1999 > 1000"
    assert told["decisions"][0]["route"] == "remote"
    assert told["report"]["outcome"] == "ok"
    assert told["report"]["wire_bytes"] == answer["prfaas"]["wire_bytes"]


def test_explain_predicts_what_local_prefill_would_have_taken(cluster):
    complete(cluster, 3000, headers={"X-Prfaas-Route": "local"})
    answer = complete(cluster, 2000)
    terms = cluster.decoded.ctl("explain", answer["prfaas"]["request_id"])["decisions"][0]["terms"]
    assert 0.3 < terms["alternatives"]["local"]["prefill_s"] < 2.0  # 1,999 tokens at 4,000 a second
    assert 1000 < cluster.decoded.ctl("status")["alone_prefill_tokens_per_s"] <= 4100


def test_echo_with_logprobs_stays_local(cluster):
    answer = complete(cluster, 1500, echo=True, logprobs=1)
    assert answer["prfaas"]["reason"] == "prompt_logprobs"
    assert len(tokens_of(answer)) == 1508


def test_echo_without_output_still_needs_room_for_the_last_token(cluster):
    limit = cluster.decoded.ctl("status")["model"].get("max_context", 32768)
    with pytest.raises(urllib.error.HTTPError) as e:
        complete(cluster, limit, max_tokens=0, echo=True)
    status, error = http_status(e.value)
    assert (status, error["error"]["code"]) == (400, "context_length_exceeded")


def test_every_choice_from_one_transfer(cluster):
    one = complete(cluster, 2000, temperature=1, seed=3)
    three = complete(cluster, 2000, temperature=1, seed=3, n=3)
    assert len(three["choices"]) == 3
    assert three["prfaas"]["raw_bytes"] == one["prfaas"]["raw_bytes"]


def metric(c: Cluster, name: str) -> float:
    lines = [line for line in c.get("/metrics").splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def eventually(check, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)


async def test_client_that_leaves_stops_the_peer_within_a_chunk():
    slow = {"fake": {**FAST["fake"], "prefill_tokens_per_s": 1000}}
    with fake_cluster(prefilld=slow) as c:
        async with aiohttp.ClientSession() as session:
            body = {"prompt": prompt(20000), "max_tokens": 4}
            sending = asyncio.ensure_future(session.post(c.url + "/v1/completions", json=body))
            await asyncio.to_thread(
                eventually, lambda: any(r["stage"] == "prefill" for r in c.prefillds[0].ctl("requests"))
            )
            sending.cancel()
        left_at = time.monotonic()
        await asyncio.to_thread(eventually, lambda: c.prefillds[0].ctl("requests") == [])
        assert time.monotonic() - left_at < 2.0
        await asyncio.to_thread(eventually, lambda: c.decoded.ctl("requests") == [])
        for daemon in c.daemons:
            await asyncio.to_thread(eventually, lambda d=daemon: not any(d.ctl("status")["state_bytes"].values()))


def test_overload_is_429_with_gate_value_limit_setting():
    limits = {"admission": {"max_running_requests": 1, "max_queued_requests": 1}}
    slow = {"fake": {**FAST["fake"], "decode_tokens_per_s": 20}}
    with fake_cluster(0, decoded={**limits, **slow}) as c:
        body = json.dumps({"prompt": prompt(10), "max_tokens": 100, "ignore_eos": True})
        url = c.url + "/v1/completions"
        curl = ["curl", "-s", "-d", body, "-H", "content-type: application/json", url]
        clients = [subprocess.Popen(curl, stdout=subprocess.DEVNULL) for _ in range(2)]
        eventually(lambda: c.decoded.ctl("status")["num_queued"] == 1)
        with pytest.raises(urllib.error.HTTPError) as e:
            complete(c, 10)
        status, error = http_status(e.value)
        assert status == 429
        assert e.value.headers["Retry-After"] == "1"
        text = json.dumps(error)
        for part in ("queued_requests", "admission.max_queued_requests"):
            assert part in text
        assert metric(c, "prfaas_shed_total") == 1
        for client in clients:
            client.terminate()
            client.wait()
        eventually(lambda: c.decoded.ctl("requests") == [])


def test_no_peer_falls_back_within_the_budget_then_503_then_recovers():
    budget = {"fallback": {"local_prefill_tokens_per_s": 100, "burst_tokens": 1000}}
    with fake_cluster(decoded=budget) as c:
        c.prefillds[0].kill()
        eventually(lambda: c.decoded.ctl("peers")[0]["state"] != "ready")
        assert complete(c, 3000)["prfaas"]["reason"] == "no_peer"
        with pytest.raises(urllib.error.HTTPError) as e:
            complete(c, 3000)
        status, error = http_status(e.value)
        assert status == 503
        assert int(e.value.headers["Retry-After"]) > 1
        assert "fallback.local_prefill_tokens_per_s" in error["error"]["message"]
        assert complete(c, 50)["prfaas"]["route"] == "local"
        c.prefillds[0].start().wait_ready()
        c.wait_peers()
        assert complete(c, 3000)["prfaas"]["route"] == "remote"


def test_taken_port_is_noticed_before_the_model_is_loaded():
    with fake_cluster(1) as c:
        second = Daemon("second", "prefilld", {**c.prefillds[0].config}, c.folder)
        second.config["control"] = {"socket": str(c.folder / "second.sock")}
        second.start()
        assert second.process.wait(30) == 3
        assert "listen.port" in second.log_tail()
        assert "loading the model" not in second.log_tail()


def test_peers_join_and_leave_by_reload_and_a_bad_file_changes_nothing():
    with fake_cluster(2) as c:
        config = c.decoded.config
        both = config["peers"]
        config["peers"] = both[:1]
        c.decoded.write_config()
        c.decoded.process.send_signal(signal.SIGHUP)
        eventually(lambda: [p["name"] for p in c.decoded.ctl("peers")] == ["prefilld0"])
        config["peers"] = both[1:]
        c.decoded.write_config()
        c.decoded.ctl("reload")
        c.wait_peers()
        assert complete(c, 2000)["prfaas"]["peer"] == "prefilld1"
        config["routing"] = {"threshold_tokens": -5}
        c.decoded.write_config()
        with pytest.raises(subprocess.CalledProcessError):
            c.decoded.ctl("reload")
        assert complete(c, 2000)["prfaas"]["peer"] == "prefilld1"


async def test_prefilld_drains_what_it_took_and_decoded_looks_elsewhere():
    slow = {"fake": {**FAST["fake"], "prefill_tokens_per_s": 4000}}
    with fake_cluster(prefilld=slow) as c:
        running = asyncio.create_task(asyncio.to_thread(complete, c, 8000))
        await asyncio.to_thread(eventually, lambda: c.prefillds[0].ctl("requests") != [])
        c.prefillds[0].process.send_signal(signal.SIGTERM)
        assert (await running)["prfaas"]["route"] == "remote"
        assert c.prefillds[0].process.wait(20) == 0
        assert (await asyncio.to_thread(complete, c, 2000))["prfaas"]["reason"] == "no_peer"


async def test_decoded_drains_and_exits_cleanly():
    slow = {"fake": {**FAST["fake"], "decode_tokens_per_s": 20}}
    with fake_cluster(decoded=slow) as c:
        running = asyncio.create_task(asyncio.to_thread(complete, c, 2000, 40, ignore_eos=True))
        await asyncio.to_thread(eventually, lambda: c.decoded.ctl("requests") != [])
        c.decoded.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(eventually, lambda: c.decoded.ctl("status")["state"] == "draining")
        with pytest.raises((urllib.error.HTTPError, urllib.error.URLError)):
            await asyncio.to_thread(complete, c, 10)
        assert (await running)["usage"]["completion_tokens"] == 40
        assert await asyncio.to_thread(c.decoded.process.wait, 20) == 0


def test_many_tiny_prompts_at_once_all_go_remote():
    """The whole prefill is over before the event loop hears of its first segment: no part may come out negative."""
    with fake_cluster(decoded={"routing": {"threshold_tokens": 0}}) as c:
        num_chars = len(c.decoded.log_path.read_text())
        for _ in range(3):
            with ThreadPoolExecutor(12) as pool:
                answers = list(pool.map(lambda _: complete(c, 2), range(12)))
            assert [a["prfaas"]["route"] for a in answers] == ["remote"] * 12
            assert min(a["prfaas"]["timing"][p] for a in answers for p in PARTS) >= 0
        assert "peer is down" not in c.decoded.log_path.read_text()[num_chars:]


def test_a_peer_that_forgot_the_stream_while_we_slept_is_asked_again():
    """decoded sleeps past the lease: prefilld says so instead of breaking the session, and has done nothing wrong."""
    # The session dies after three heartbeats: between the two there must be time to look, on a busy machine too.
    lease = {"stream": {"lease": "8s"}, "links": {"heartbeat": "4s"}}
    slow = {"fake": {**FAST["fake"], "prefill_tokens_per_s": 400}}
    with fake_cluster(decoded=lease, prefilld={**lease, **slow}) as c, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, c, 3000)
        eventually(lambda: any(r["stage"] == "prefill" for r in c.prefillds[0].ctl("requests")))
        c.decoded.process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: c.prefillds[0].ctl("requests") == [], 30)
        finally:
            c.decoded.process.send_signal(signal.SIGCONT)
        woken_at = time.monotonic()
        assert answer.result(60)["prfaas"]["route"] == "remote"
        assert time.monotonic() - woken_at < 20, "7.5 s of them are the prefill"
        assert 'prfaas_offload_failures_total{error="StaleHandle",peer="prefilld0"} 1.0' in c.get("/metrics")
        c.wait_peers()


def test_drain_timeout_ends_in_order_with_an_error_for_the_client():
    slow = {"fake": {**FAST["fake"], "decode_tokens_per_s": 5}}
    with fake_cluster(0, decoded={**slow, "drain": {"timeout": "1s"}}) as c, ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, c, 10, 500, ignore_eos=True)
        eventually(lambda: c.decoded.ctl("requests") != [])
        told_at = time.monotonic()
        c.decoded.process.send_signal(signal.SIGTERM)
        assert c.decoded.process.wait(20) == 0
        assert time.monotonic() - told_at < 6
        with pytest.raises(urllib.error.HTTPError) as e:
            running.result(10)
        assert http_status(e.value)[0] == 503


def test_full_disk_under_the_trace_does_not_stop_serving():
    full = {"log": {"trace_file": "/dev/full"}}
    with fake_cluster(decoded=full, prefilld=full) as c:
        for _ in range(40):
            assert complete(c, 2000)["prfaas"]["route"] == "remote"
        eventually(lambda: "the trace ends here" in c.prefillds[0].log_path.read_text())
        assert {d.name: d.stop() for d in c.daemons} == {"prefilld0": 0, "decoded": 0}


def test_finished_requests_are_kept_without_their_tokens():
    long = {"prefill_tokens_per_s": 0, "num_layers": 1, "num_heads": 1, "head_dim": 8, "max_context": 131072}
    with fake_cluster(0, decoded={"routing": {"mode": "local-only"}, "fake": long}) as c:
        for _ in range(5):
            complete(c, 100_000, max_tokens=1)
        before = resident_bytes(c.decoded.pid)
        for _ in range(25):
            complete(c, 100_000, max_tokens=1)
        grown = resident_bytes(c.decoded.pid) - before
        print(f"{grown / 1e6:.1f} MB for 25 requests")
        # One prompt of this length takes about 5 MB as a tuple and a list: all of them would be 120 MB.
        assert grown < 60e6


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_short_prompt_overtakes_a_long_one_at_prefilld():
    slow = {"fake": {**FAST["fake"], "prefill_tokens_per_s": 2000}}
    with fake_cluster(decoded={"routing": {"threshold_tokens": 100}}, prefilld=slow) as c:
        body = json.dumps({"prompt": prompt(30000), "max_tokens": 1})
        curl = ["curl", "-s", "-d", body, "-H", "content-type: application/json", c.url + "/v1/completions"]
        long = subprocess.Popen(["sh", "-c", 'cat | "$@"', "sh", *curl[:3], "@-", *curl[4:]], stdin=subprocess.PIPE,
                                stdout=subprocess.DEVNULL)  # fmt: skip
        long.stdin.write(body.encode())
        long.stdin.close()
        eventually(lambda: any(r["num_computed_tokens"] > 0 for r in c.prefillds[0].ctl("requests")))
        answer = complete(c, 200)
        timing = answer["prfaas"]["timing"]
        # Two chunks of 256 tokens take 0.256 s; the rest of the long prompt would take ten seconds and more.
        assert timing["remote_queue_s"] < 0.6
        assert long.poll() is None
        long.terminate()
        long.wait()


@pytest.mark.parametrize("name", ["decoded", "prefilld"])
def test_fake_peer_runs_either_daemon_alone(tmp_path, name):
    num = 0 if name == "decoded" else 1
    with fake_cluster(num) as c:
        daemon = c.decoded if name == "decoded" else c.prefillds[0]
        daemon.stop()
        daemon.config.pop("peers", None)
        daemon.args = ("--fake-peer", "200Mbit/s,10ms")
        daemon.start().wait_ready()
        if name == "decoded":
            c.wait_peers()
            info = complete(c, 2000)["prfaas"]
            assert info["route"] == "remote"
            assert info["timing"]["transfer_s"] > 0.5 * info["wire_bytes"] * 8 / 200e6
        else:
            eventually(lambda: "fake request done" in daemon.log_tail(100), 30)


def test_link_bench_measures_the_links_to_a_peer(cluster):
    ctl = cluster.decoded.ctl
    found = ctl("link", "bench", "prefilld0", "--bytes", "8MiB")
    assert found["peer"] == "prefilld0"
    assert found["goodput_bps"] > 1e6
    assert found["num_data_links"] == 1
    refused = {
        ("prefilld9",): "there is no peer 'prefilld9'; configured: prefilld0",
        ("prefilld0", "--bytes", "2GiB"): "2147483648 bytes cannot be measured, 1 to 1073741824",
    }
    for wrong, text in refused.items():
        with pytest.raises(subprocess.CalledProcessError) as e:
            ctl("link", "bench", *wrong)
        assert text in e.value.stderr.decode()
