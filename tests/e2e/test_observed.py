"""What operators see: failed remote time, sessions and refusals at prefilld, a model without chat."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster, Daemon, running_cluster
from common.request import Timing

FAKE = {"engine": {"backend": "fake"}, "fake": {"prefill_tokens_per_s": 2000, "decode_tokens_per_s": 200}}
PARTS = tuple(part.name for part in fields(Timing) if part.name != "ttft_s")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(None, decoded=FAKE, prefilld=FAKE) as c:
        yield c


def eventually(check: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)


def complete(c: Cluster, num_tokens: int) -> Any:
    body = {"prompt": [3 + i % 200 for i in range(num_tokens)], "max_tokens": 2, "temperature": 0}
    return c.post("/v1/completions", body, {"X-Prfaas-Timing": "1"})["prfaas"]


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = [line.rsplit(" ", 1) for line in response.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def lines(daemon: Daemon, text: str) -> list[str]:
    return [line for line in daemon.log_path.read_text().splitlines() if text in line]


def test_time_lost_at_a_peer_that_died_is_a_part_of_its_own(cluster):
    prefilld = cluster.prefillds[0]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, cluster, 6000)
        eventually(lambda: any(r["num_computed_tokens"] > 0 for r in prefilld.ctl("requests")))
        prefilld.kill()
        answer = running.result(60)
    timing = answer["timing"]
    assert (answer["route"], answer["reason"]) == ("local", "peer_failed")
    assert timing["failed_remote_s"] > 0.1 > timing["queue_s"]
    assert sum(timing[p] for p in PARTS) == pytest.approx(timing["ttft_s"], rel=0.02)
    told = cluster.decoded.ctl("explain", answer["request_id"])
    assert [d["route"] for d in told["decisions"]] == ["remote", "local"]
    first, second = told["decisions"]
    assert first["until_in_place_s"] == pytest.approx(timing["failed_remote_s"], abs=1e-5) and "failure" in first
    assert second["until_in_place_s"] == pytest.approx(timing["prefill_s"], abs=0.2)
    assert told["report"]["predicted_ttft_s"] == answer["predicted_ttft_s"]
    assert (answer["cached_tokens"], answer["uncached_tokens"]) == (0, 5999)
    if first["kept_tokens"]:
        assert answer["raw_bytes"] > 0
    counted = metrics(cluster.decoded.config["http"]["port"])
    assert counted['prfaas_failed_remote_seconds_count{peer="prefilld0"}'] == 1
    assert counted['prfaas_failed_remote_seconds_sum{peer="prefilld0"}'] > 0.1
    (done,) = [line for line in lines(cluster.decoded, "request done") if "route=local" in line]
    assert "failed_remote_s=" in done and "peer=" not in done


def test_prefilld_tells_of_sessions_and_counts_their_bytes(cluster):
    prefilld = cluster.prefillds[0]
    port = prefilld.config["http"]["port"]
    report = complete(cluster, 2000)
    now = metrics(port)
    assert (now["prfaas_sessions"], now["prfaas_links"]) == (1, 2)
    assert now['prfaas_link_bytes_total{direction="out"}'] > report["wire_bytes"]
    assert now['prfaas_link_bytes_total{direction="in"}'] > 4 * 1999
    assert now["prfaas_raw_bytes_total"] == report["raw_bytes"]
    assert now['prfaas_prefills_total{outcome="ok"}'] == 1
    assert now['prfaas_prefill_seconds_bucket{le="600.0"}'] == 1
    assert now['prfaas_prefill_queue_seconds_bucket{le="600.0"}'] == 1
    (done,) = lines(prefilld, "prefill ok")
    facts = dict(part.split("=") for part in done.split() if "=" in part)
    assert int(facts["raw_bytes"]) == report["raw_bytes"]
    assert float(facts["prefill_s"]) == pytest.approx(report["timing"]["prefill_s"], abs=0.01)
    assert 0 <= float(facts["queue_s"]) < 1
    (begun,) = lines(prefilld, "session begins")
    assert "peer=decoded" in begun and "instance=" in begun and "address=127.0.0.1:" in begun
    cluster.decoded.stop()
    eventually(lambda: lines(prefilld, "session ends"))
    (ended,) = lines(prefilld, "session ends")
    for part in ("the client left", "why=", "num_links=2", "bytes_in=", "bytes_out="):
        assert part in ended
    after = metrics(port)
    assert (after["prfaas_sessions"], after["prfaas_links"]) == (0, 0)
    name = 'prfaas_link_bytes_total{direction="out"}'
    assert after[name] >= now[name]


def test_a_flood_of_strangers_is_one_line(cluster):
    prefilld = cluster.prefillds[0]
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", prefilld.config["listen"]["port"])) as link:
            link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while link.recv(4096):
                pass
    counted = metrics(prefilld.config["http"]["port"])
    assert sum(n for name, n in counted.items() if name.startswith("prfaas_handshakes_failed_total")) == 40
    assert len(lines(prefilld, "connection refused before its handshake")) == 1


def test_requests_that_wait_for_a_row_say_so_and_are_counted():
    with running_cluster(None, num_prefillds=0, decoded={**FAKE, "batch": {"max_batch": 2}}) as c:
        port = c.decoded.config["http"]["port"]
        body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(c.post, "/v1/completions", body) for _ in range(4)]
            wanted = ["decoding", "decoding", "waiting for a row", "waiting for a row"]
            eventually(lambda: sorted(r["stage"] for r in c.decoded.ctl("requests")) == wanted)
            eventually(lambda: metrics(port)["prfaas_row_waiting_sequences"] == 2)
            now = metrics(port)
            assert now["prfaas_batch_rows"] == 2
            assert 0 < now["prfaas_reserved_state_bytes"] <= now["prfaas_max_state_bytes"]
            assert {a.result()["usage"]["completion_tokens"] for a in answers} == {400}
        after = metrics(port)
        assert after["prfaas_output_tokens_total"] == 1600 == c.decoded.ctl("status")["num_output_tokens"]
        assert after['prfaas_request_seconds_count{route="local"}'] == 4
        assert any(name.startswith("prfaas_model_info{") for name in after)
        c.post("/v1/completions", {**body, "n": 3, "max_tokens": 4})
        done = lines(c.decoded, "request done")
        assert len(done) == 5 and " num_choices=3 finish_reasons=length,length,length duration_s=" in done[-1]
        assert float(done[0].split("duration_s=")[1].split()[0]) > 1.5
        (told,) = lines(c.decoded, "no prefill peer is configured: all prompts are computed here")
        assert " info " in told and not lines(c.decoded, "degraded")


def test_a_model_without_chat_template_says_so(gemma3_dir: Path):
    with running_cluster(gemma3_dir, num_prefillds=0) as c:
        assert c.decoded.ctl("status")["model"]["chat"] is False
        (told,) = lines(c.decoded, "/v1/chat/completions is not available")
        assert " info " in told and "no chat template" in told
