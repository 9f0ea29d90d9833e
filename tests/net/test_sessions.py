"""What prefilld says of sessions: a log line at begin and end, and counts that neither lose nor double bytes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from common.linkfacts import PathEstimate
from tests.net.rig import FAST, Rig, on_uvloop, rigged


async def until(check) -> None:
    async with asyncio.timeout(5):
        while not check():
            await asyncio.sleep(0.01)


def lines(caplog, begins: str):
    return [r for r in caplog.records if r.name == "common.net.server_peer" and r.message.startswith(begins)]


@on_uvloop
async def test_sessions_are_logged_and_counted(caplog):
    caplog.set_level(logging.INFO)
    async with rigged() as rig:
        (begun,) = lines(caplog, "session begins")
        assert (begun.peer, begun.instance) == ("d", "decode-1") and begun.address.startswith("127.0.0.1:")
        await until(lambda: rig.server.num_links == 3)
        assert rig.server.num_sessions == 1
        prefill, sink = rig.ask(2000)
        report = await rig.finish(prefill, sink)
        num_in, num_out = rig.server.traffic
        assert num_out > report.wire_bytes and num_in > 4 * 2000
        (row,) = rig.server.sessions
        assert row["bytes_out"] <= num_out and row["delivery_bps"] is None  # loopback is memory speed
        await rig.client.close()
        await until(lambda: rig.server.num_links == 0)
        (ended,) = lines(caplog, "session ends")
        assert ended.message == "session ends, the client left" and "closes the session" in ended.why
        assert (ended.peer, ended.num_links, ended.num_streams_left) == ("d", 3, 0)
        assert rig.server.num_sessions == 0 and not rig.server.sessions
        # Everything that went stays counted although nothing is left of the session.
        assert rig.server.traffic[1] >= num_out and rig.server.traffic[0] >= num_in
        # The handshake of the control link was before its session.
        assert report.wire_bytes < ended.bytes_out <= rig.server.traffic[1]


@on_uvloop
async def test_a_cut_session_ends_and_begins_again_with_its_own_bytes(caplog):
    caplog.set_level(logging.INFO)
    async with rigged(proxy=True) as rig:
        prefill, sink = rig.ask(2000)
        await rig.finish(prefill, sink)
        num_out = rig.server.traffic[1]
        rig.proxy.cut()
        await until(lambda: len(lines(caplog, "session begins")) == 2)
        await until(lambda: rig.server.num_links == 3)
        await rig.client.close()
        await until(lambda: len(lines(caplog, "session ends")) == 2)
        first, second = lines(caplog, "session ends")
        assert first.message == "session ends" and first.bytes_out > 1e6 > second.bytes_out
        assert num_out <= rig.server.traffic[1] < 1.5 * num_out


class Path:
    """An egress control that has seen a path and wants so many links for it."""

    resent_bytes = 0

    def __init__(self, num_links: int) -> None:
        self.wanted = num_links

    def step(self, now, samples):
        return {}

    def estimate(self, peer):
        return PathEstimate(1e6, 2e6, 0.5, 0.02, 0.01, 0.01, 0.001, None)

    def num_links(self, peer, congestion_control):
        return self.wanted


@pytest.mark.parametrize(("data_links", "wanted", "expected"), [(0, 5, 5), (0, 99, 8), (3, 5, 3)])
@on_uvloop
async def test_data_links_grow_as_the_sender_asks(data_links, wanted, expected):
    rig = Rig(options=replace(FAST, data_links=data_links, heartbeat_s=0.1))
    rig.egress = Path(wanted)
    await rig.start()
    try:
        await rig.state("ready")
        prefill, sink = rig.ask(300)
        await rig.finish(prefill, sink)
        async with asyncio.timeout(5):
            while rig.client.status()["num_links"] != 1 + expected:
                await asyncio.sleep(0.02)
                assert rig.client.state == "ready"  # further links are no reason to wait
        await asyncio.sleep(0.3)
        assert rig.client.status()["num_links"] == 1 + expected
        prefill, sink = rig.ask(3000, name="r2")
        await rig.finish(prefill, sink)
        assert rig.client.load["path_capacity_bps"] == 2e6
    finally:
        await rig.close()
