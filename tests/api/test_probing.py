"""Idle paths are looked at: when, how far, and how often while nothing changes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from common.errors import LinkLost
from decoded.metrics import DecodeMetrics
from decoded.probing import LEAST_BYTES, PathProber


class Peer(SimpleNamespace):
    """A peer with a path; `real_bps` is what a look finds."""

    def __init__(self, capacity_bps: float, age_s: float = 60.0, **changes) -> None:
        load = {"path_capacity_bps": capacity_bps, "path_age_s": age_s}
        facts = {
            "name": "p",
            "host": "192.0.2.1",
            "state": "ready",
            "num_streams": 0,
            "load": load,
            "asked": [],
            "real_bps": capacity_bps,
        }
        facts["tells"] = True
        super().__init__(**(facts | changes))

    async def measure(self, num_bytes, timeout_s):
        self.asked.append(num_bytes)
        if self.real_bps is None:
            raise LinkLost("gone")
        if self.tells:
            self.load["path_capacity_bps"] = self.real_bps
        return SimpleNamespace(goodput_bps=self.real_bps)


async def turns(monkeypatch, peer: Peer, num: int, interval_s: float = 10.0, aged_s: float = 60.0) -> float:
    """So many turns of the prober, the path idle for `aged_s` at each; the bytes counted."""
    registry = CollectorRegistry()
    monkeypatch.setattr(PathProber, "turn_s", 0.0)
    prober = PathProber(lambda: [peer], DecodeMetrics(registry), lambda: interval_s)
    prober.start()
    for _ in range(4 * num):
        peer.load["path_age_s"] = aged_s
        await asyncio.sleep(0)
    await prober.close()
    return registry.get_sample_value("prfaas_probed_bytes_total", {"peer": "p"}) or 0.0


async def test_an_idle_path_is_asked_for_a_second_of_what_it_carried(monkeypatch):
    peer = Peer(8e6)
    counted = await turns(monkeypatch, peer, 1)
    assert peer.asked[0] == 1_000_000
    assert counted == sum(peer.asked)
    narrow = Peer(1000.0)
    await turns(monkeypatch, narrow, 1)
    assert narrow.asked[0] == LEAST_BYTES


@pytest.mark.parametrize(
    "peer",
    [Peer(0.0, host="127.0.0.1"), Peer(0.0, num_streams=1), Peer(8e6, num_streams=1), Peer(8e6, state="down")],
    ids=["it is no path", "the first prompt comes now", "it is in use", "it is down"],
)
async def test_other_paths_are_left_alone(monkeypatch, peer):
    await turns(monkeypatch, peer, 3)
    assert peer.asked == []


async def test_a_path_of_which_nothing_is_known_is_looked_at_once_for_each_connection(monkeypatch):
    peer = Peer(0.0, real_bps=80e6, tells=False)
    assert await turns(monkeypatch, peer, 3) == (1 << 20) + 10_000_000
    assert peer.asked == [1 << 20, 10_000_000], "a second's worth of what the first look found"
    never = Peer(0.0, real_bps=80e6)
    await turns(monkeypatch, never, 3, interval_s=float("inf"))
    assert never.asked == []


async def test_a_path_is_unknown_again_after_a_connection_was_lost(monkeypatch):
    peer = Peer(0.0, real_bps=80e6, tells=False)
    monkeypatch.setattr(PathProber, "turn_s", 0.0)
    prober = PathProber(lambda: [peer], DecodeMetrics(CollectorRegistry()), lambda: 10.0)
    for peer.state in ("ready", "ready", "down", "ready"):
        await prober.turn()
    assert peer.asked == 2 * [1 << 20, 10_000_000]


async def test_what_was_seen_a_moment_ago_is_not_asked_for(monkeypatch):
    peer = Peer(8e6)
    await turns(monkeypatch, peer, 3, aged_s=9.0)
    assert peer.asked == []
    await turns(monkeypatch, peer, 3, interval_s=float("inf"))
    assert peer.asked == []


async def test_a_path_that_stays_as_it_is_is_asked_less_often(monkeypatch):
    same, grows = Peer(8e6), Peer(8e6)
    grows.measure_real = grows.measure

    async def doubled(num_bytes, timeout_s):
        grows.real_bps = 2 * grows.load["path_capacity_bps"]
        return await grows.measure_real(num_bytes, timeout_s)

    grows.measure = doubled
    await turns(monkeypatch, same, 50, aged_s=35.0)
    await turns(monkeypatch, grows, 5, aged_s=35.0)
    assert len(same.asked) == 3, "at 10, again at 10, and at 20 s"
    assert len(grows.asked) > 3


async def test_a_look_that_fails_is_no_more_than_that(monkeypatch):
    peer = Peer(8e6)
    peer.real_bps = None
    assert await turns(monkeypatch, peer, 3) == 0.0
    assert peer.asked


async def test_a_turn_that_fails_does_not_end_the_looking(monkeypatch, caplog):
    peer = Peer(8e6)
    failures = [KeyError("a bug")]
    peer.measure_real = peer.measure

    async def measure(num_bytes, timeout_s):
        if failures:
            raise failures.pop()
        return await peer.measure_real(num_bytes, timeout_s)

    peer.measure = measure
    await turns(monkeypatch, peer, 4)
    assert peer.asked
    assert "work in the background failed" in caplog.text
