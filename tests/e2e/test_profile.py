"""`profile` of real daemons: it predicts what a prompt takes, is there after a restart, and is what `plan` reads."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import WITH_CACHE, Cluster, Daemon, running_cluster
from benchmarks.text import real_text
from decoded.ctl.__main__ import main

SHORT = ("--max-tokens", "512", "--timeout", "60s")
SHORTER = ("--max-tokens", "256", "--timeout", "60s")
COST = ("prefill_constant_s", "prefill_per_token_s", "prefill_per_square_s")


@pytest.fixture(scope="module")
def measured(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[str, Path]]]:
    """Both daemons, with what they measured of themselves."""
    folder = tmp_path_factory.mktemp("profiles")
    files = {"own": folder / "own.json", "remote": folder / "remote.json"}
    with running_cluster(smollm2_dir, decoded=WITH_CACHE, prefilld=WITH_CACHE) as cluster:
        # Each has a core of its own.
        with ThreadPoolExecutor() as both:
            done = [
                both.submit(cluster.prefillds[0].ctl, "profile", *SHORT, "--out", str(files["remote"])),
                both.submit(cluster.decoded.ctl, "profile", *SHORTER, "--rows", "1,4", "--out", str(files["own"])),
            ]
        assert all(d.result()["stored"] for d in done)
        yield cluster, files


def told_load(cluster: Cluster) -> dict[str, float]:
    """What decoded was told by its peer; Status comes with every heartbeat."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        (peer,) = cluster.decoded.ctl("peers")
        load: dict[str, float] = peer["load"]
        if load.get("prefill_per_token_s"):
            return load
        time.sleep(0.2)
    raise AssertionError(f"the peer never told its cost: {load}")


def seconds(cost: dict[str, float], num_tokens: int) -> float:
    constant, linear, square = (cost[key] for key in COST)
    return constant + linear * num_tokens + square * num_tokens**2


def test_a_profile_predicts_what_prompts_take_and_outlives_the_daemon(measured: tuple[Cluster, dict[str, Path]]):
    cluster, files = measured
    server = cluster.prefillds[0]
    status = server.ctl("status")["prefill_cost"]
    assert not status["has_profile"] and "constant_s" not in status
    assert "prefill_per_token_s" not in cluster.decoded.ctl("peers")[0]["load"]
    server.stop()
    server.start().wait_ready()
    cluster.wait_peers()
    status = server.ctl("status")["prefill_cost"]
    fitted = json.loads(files["remote"].read_text())["prefill"]
    assert status == {**{k: fitted[k] for k in ("constant_s", "per_token_s", "per_square_s")},
                      "has_profile": True, "num_prompts": 0}  # fmt: skip
    load = told_load(cluster)
    assert [load[key] for key in COST] == [fitted[key.removeprefix("prefill_")] for key in COST]

    ratios = sorted(predicted_by_taken(cluster, load, real_text(6000)[n * 2000 : n * 2000 + 1700]) for n in range(3))
    assert 1 / 2 < ratios[1] < 2, ratios
    assert server.ctl("status")["prefill_cost"]["num_prompts"] == 3


def predicted_by_taken(cluster: Cluster, load: dict[str, float], text: str) -> float:
    """Of a prompt that goes to the peer."""
    body = {"model": "smollm2-135m-instruct", "prompt": text, "max_tokens": 1}
    answer = cluster.post("/v1/completions", body, {"X-Prfaas-Timing": "1", "X-Prfaas-Route": "remote"})
    assert answer["prfaas"]["route"] == "remote"
    num_tokens = answer["usage"]["prompt_tokens"] - 1
    assert 250 < num_tokens < 700
    taken_s: float = answer["prfaas"]["timing"]["prefill_s"]
    return seconds(load, num_tokens) / taken_s


def test_measuring_leaves_the_caches_alone(measured: tuple[Cluster, dict[str, Path]]):
    """Nothing but prompts of clients was ever looked up."""
    cluster, _ = measured
    stats = cluster.decoded.ctl("cache", "stats")
    assert stats["num_lookups"] <= 3 and stats["hit_tokens"] == 0
    prompt = {"model": "smollm2-135m-instruct", "prompt": real_text(1200), "max_tokens": 2}
    headers = {"X-Prfaas-Timing": "1", "X-Prfaas-Route": "local"}
    num_tokens = cluster.post("/v1/completions", prompt, headers)["usage"]["prompt_tokens"]
    cluster.decoded.ctl("profile", "--max-tokens", "64", "--rows", "1", "--timeout", "30s")
    again = cluster.post("/v1/completions", prompt, headers)["prfaas"]
    assert again["cached_tokens"] == num_tokens - 1


def test_a_plan_is_made_from_both_files(measured: tuple[Cluster, dict[str, Path]], capsys: pytest.CaptureFixture[str]):
    _, files = measured
    own, remote = (json.loads(files[key].read_text()) for key in ("own", "remote"))
    assert own["decode"]["max_rows"] == 16 and own["decode"]["base_s"] > 0
    assert "decode" not in remote and "stored" not in own
    assert own["model"] == remote["model"] and own["state"] == remote["state"]
    assert own["state"]["bytes_per_token"] == 30 * 2 * 3 * 64 * 4
    scenario: dict[str, Any] = {
        "own": "own.json",
        "remote": "remote.json",
        "num_remote": 1,
        "num_own": 2,
        "link": {"rate": "200Mbit/s", "rtt": "20ms", "codec_ratio": 0.8},
        "workload": {"kind": "log-normal", "mu": 6, "sigma": 1, "low": 32, "high": 4000, "num_output": 64},
        "arrivals": {"load": 0.7, "num_requests": 300},
        "slo": {"ttft": "10s", "tpot": "50ms"},
    }
    file = files["own"].with_name("plan.json")
    file.write_text(json.dumps(scenario))
    assert main(["plan", str(file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for way in ("closed_form", "simulated"):
        assert plan[way]["homogeneous"]["throughput_rps"] > 0
        assert plan[way]["homogeneous"]["ttft_mean_s"] > 0


def test_who_interrupts_the_command_ends_the_measurement(measured: tuple[Cluster, dict[str, Path]]):
    cluster, _ = measured
    daemon: Daemon = cluster.decoded
    command = [sys.executable, "-m", "decoded.ctl", "--socket", str(daemon.socket_path), "profile"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as asking:
        while "measuring a profile max_tokens=8" not in daemon.log_tail(5):
            assert asking.poll() is None
            time.sleep(0.05)
        with pytest.raises(subprocess.CalledProcessError) as refused:
            daemon.ctl("profile", *SHORTER)
        assert b"a profile is being measured already" in refused.value.stderr
        asking.terminate()
    deadline = time.monotonic() + 10
    while "profile given up" not in daemon.log_tail(5):
        assert time.monotonic() < deadline, daemon.log_tail()
        time.sleep(0.05)
    assert daemon.ctl("profile", "--max-tokens", "32", "--rows", "1")["prefill"]["points"]
    metrics = urllib.request.urlopen(cluster.url + "/metrics", timeout=10).read().decode()
    assert 'prfaas_profiles_total{outcome="cancelled"} 1.0' in metrics
    assert 'prfaas_profiles_total{outcome="refused"} 1.0' in metrics
