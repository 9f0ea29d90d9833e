"""--fake-peer with a real model: decoded alone gets finite logits, prefilld alone starts and stops without a scare."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.cluster import Cluster, make_cluster
from benchmarks.text import real_text

SCARES = (" warning ", " error ", "Traceback", "Exception in callback")


@pytest.fixture
def alone(smollm2_dir: Path, tmp_path: Path):
    """Starts one daemon of a cluster with --fake-peer; what still runs is stopped."""
    cluster = make_cluster(tmp_path, smollm2_dir)
    cluster.decoded.config.pop("peers")

    def start(name: str) -> Cluster:
        daemon = cluster.decoded if name == "decoded" else cluster.prefillds[0]
        daemon.args = ("--fake-peer", "500Mbit/s,10ms")
        daemon.start().wait_ready()
        return cluster

    yield start
    cluster.stop()


def scares(log: str) -> list[str]:
    return [line for line in log.splitlines() if any(word in line for word in SCARES)]


def test_decoded_alone_answers_long_prompts_and_says_what_they_are_worth(alone):
    c = alone("decoded")
    c.wait_peers()
    body = json.dumps({"prompt": real_text(8000), "max_tokens": 8, "temperature": 0, "ignore_eos": True}).encode()
    headers = {"Content-Type": "application/json", "X-Prfaas-Timing": "1"}
    with urllib.request.urlopen(urllib.request.Request(c.url + "/v1/completions", body, headers), timeout=60) as reply:
        answer, warning = json.load(reply), reply.headers["X-Prfaas-Warning"]
    assert answer["usage"]["completion_tokens"] == 8
    assert (answer["prfaas"]["route"], answer["prfaas"]["peer"]) == ("remote", "fake-peer")
    assert "mean nothing" in answer["prfaas"]["warning"] and "mean nothing" in warning
    # Numbers like those of a real state: a codec finds something, not everything.
    assert 0.5 < answer["prfaas"]["wire_bytes"] / answer["prfaas"]["raw_bytes"] < 0.98
    assert "mean nothing" in c.decoded.ctl("status")["warning"]
    assert c.decoded.stop() == 0
    (told,) = scares(c.decoded.log_path.read_text())
    assert "mean nothing" in told


def test_prefilld_alone_starts_and_stops_without_a_scare(alone):
    prefilld = alone("prefilld").prefillds[0]
    deadline = time.monotonic() + 60
    while "fake request done" not in prefilld.log_path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert prefilld.stop() == 0
    assert scares(prefilld.log_path.read_text()) == []
