"""`link bench` between real ends: bytes are counted, streams go first, one at a time; loss and limits are told."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import BadMessage, LinkLost, LocalProtocolError, TransferTimeout
from common.net.measure import FILLER, FillerSource, Measuring
from common.wire.messages import Filler, Measure
from tests.net.rig import both_loops, on_uvloop, rigged
from tests.net.tls_ends import TlsEnds


@both_loops
@pytest.mark.parametrize("num_bytes", [1, 4096, 3_000_000])
async def test_the_links_are_measured(num_bytes):
    async with rigged() as rig:
        found = await rig.client.measure(num_bytes, 10)
        assert 0 < found.transfer_s <= found.seconds
        assert found.goodput_bps > 0
        assert found.num_bytes <= num_bytes
        again = await rig.client.measure(num_bytes, 10)
        assert again.goodput_bps > 0


@on_uvloop
async def test_sealed_links_are_measured(tmp_path):
    async with rigged(**TlsEnds(tmp_path).both()) as rig:
        assert (await rig.client.measure(2_000_000, 10)).goodput_bps > 0


@on_uvloop
async def test_state_goes_first_and_one_measurement_at_a_time():
    async with rigged() as rig:
        measuring = asyncio.create_task(rig.client.measure(200 << 20, 30))
        await asyncio.sleep(0.01)
        with pytest.raises(LocalProtocolError, match="is running"):
            await rig.client.measure(1, 1)
        prefill, sink = rig.ask(3000)
        await rig.finish(prefill, sink)
        assert not measuring.done()
        await measuring


@on_uvloop
async def test_limits_time_and_a_lost_session_are_told():
    async with rigged(proxy=True) as rig:
        for num_bytes in (0, -1, (1 << 30) + 1):
            with pytest.raises(LocalProtocolError, match=f"{num_bytes} bytes cannot be measured"):
                await rig.client.measure(num_bytes, 1)
        rig.proxy.flowing.clear()
        with pytest.raises(TransferTimeout, match="of 1000000 bytes within"):
            await rig.client.measure(1_000_000, 0.1)
        rig.proxy.flowing.set()
        measuring = asyncio.create_task(rig.client.measure(500 << 20, 30))
        await asyncio.sleep(0.05)
        rig.proxy.cut()
        with pytest.raises(LinkLost, match="was lost while its links were measured"):
            await measuring
        await rig.state("ready")
        assert (await rig.client.measure(100_000, 10)).goodput_bps > 0


def test_what_is_sent_is_what_was_asked_for_last() -> None:
    source = FillerSource()
    assert source.take(100) is None
    source.start(Measure(1, 250))
    assert [source.take(100)[0].num_bytes for _ in range(3)] == [100, 100, 50]
    assert source.take(100) is None
    source.start(Measure(2, 5 << 20))
    filler, payload = source.take(8 << 20)
    assert (filler.no, filler.num_bytes) == (2, len(FILLER)) == (2, len(payload))
    source.start(Measure(2, 0))
    assert source.take(100) is None


async def test_more_than_was_asked_for_is_an_error() -> None:
    measuring = Measuring()
    message = measuring.ask(100, 1.0)
    measuring.arrived(Filler(message.no + 1, 500), 2.0)  # of one that was given up
    measuring.arrived(Filler(message.no, 60), 2.0)
    with pytest.raises(BadMessage, match="120 bytes came, asked were 100"):
        measuring.arrived(Filler(message.no, 60), 3.0)
