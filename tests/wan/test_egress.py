"""The egress control on a real path: kernel TCP over the emulated link, sessions as the product makes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.transport.pair import Process, pair
from benchmarks.wan.wan import Wan
from common.net.tuning import best_congestion_control

pytestmark = pytest.mark.wan

RATE_MBIT, RTT_S = 60, 0.03


@pytest.fixture(scope="module")
def wan() -> Iterator[Wan]:
    with Wan(rate_mbit=RATE_MBIT, delay_ms=RTT_S * 500) as link:
        yield link


def fetch(ends: tuple[Process, Process], num_bytes: int, num_requests: int = 1) -> dict[str, Any]:
    """Facts about the session right after it."""
    serve, client = ends
    took = client.ask(num_bytes=num_bytes, num_requests=num_requests, concurrency=min(num_requests, 2))
    [session] = serve.ask()["sessions"]
    return {"wall_s": took["wall_s"], **session}


def test_the_path_is_found_and_its_queue_stays_short(wan: Wan) -> None:
    with pair("ends", {"max_bytes": 8 << 20, "options": {"data_links": 4}}, wan) as ends:
        fetch(ends, 8 << 20, 3)
        before = wan.stats()["A>B"].num_tail_dropped
        facts = fetch(ends, 8 << 20, 4)
        path = facts["path"]
        assert path["capacity_bps"] == pytest.approx(RATE_MBIT * 1e6, rel=0.2)
        assert path["confidence"] > 0.9
        assert path["queueing_s"] < 1.5 * RTT_S
        assert wan.stats()["A>B"].num_tail_dropped - before < 100
        assert len(facts["data_links"]) == 4
        for link in facts["data_links"]:
            assert link["congestion_control"] == (best_congestion_control() or link["congestion_control"])
            assert link["pacing_bps"] is None or link["pacing_bps"] < RATE_MBIT * 1e6


@pytest.mark.skipif(best_congestion_control() != "bbr", reason="the kernel has no bbr")
def test_links_never_stop_to_look_at_the_round_trip(wan: Wan) -> None:
    with pair("ends", {"max_bytes": 8 << 20, "options": {"data_links": 2}}, wan) as ends:
        serve, client = ends
        fetch(ends, 8 << 20, 3)
        client.tell(num_bytes=8 << 20, num_requests=13, concurrency=2)  # some 15 s
        windows: list[int] = []
        for _ in range(130):
            time.sleep(0.1)
            [session] = serve.ask()["sessions"]
            windows += [link["cwnd_bytes"] for link in session["data_links"]]
        client.hear()
    # PROBE_RTT of bbr: 200 ms with a window of four packets, after ten seconds without a shorter round trip.
    assert min(windows) > 4 * 1448


def test_loss_shows_within_a_second(wan: Wan) -> None:
    with pair("ends", {"max_bytes": 16 << 20, "options": {"data_links": 2}}, wan) as ends:
        serve, client = ends
        client.tell(num_bytes=16 << 20, num_requests=1, concurrency=1)
        time.sleep(0.7)
        wan.set(loss=0.03)
        try:
            time.sleep(1.0)
            [session] = serve.ask()["sessions"]
        finally:
            wan.set(loss=0.0)
        client.hear()
        assert session["path"]["loss"] > 0.01


def test_what_is_sent_stays_within_a_budget(wan: Wan) -> None:
    with pair("ends", {"max_bytes": 8 << 20, "max_bps": 20e6, "options": {"data_links": 3}}, wan) as ends:
        fetch(ends, 4 << 20)
        facts = fetch(ends, 8 << 20)
        assert facts["wall_s"] == pytest.approx((8 << 20) * 8 / 20e6, rel=0.15)
        assert sum(link["pacing_bps"] for link in facts["data_links"]) <= 20.1e6
