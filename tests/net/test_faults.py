"""Cuts, restarts, silence, cancels, corruption, no descriptors: every prefill ends in exactly one typed way."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from dataclasses import replace

import pytest

from benchmarks.transport.faultproxy import FaultProxy
from common.errors import (
    LinkLost,
    PeerCancelled,
    PeerDraining,
    PeerEngineFailed,
    PeerShed,
    PromptTooLong,
    RequestDamaged,
    TransferIncomplete,
    TransferTimeout,
)
from common.net.pool import PeerClient
from common.wire.frames import MAGIC, VERSION, FrameType
from tests.net.rig import FAST, WIDE, Rig, State, end, on_loops, on_uvloop, rigged

BIG = 4000
ALL = WIDE.transfer_bytes(0, BIG)


async def failure(prefill, kind, timeout=10.0):
    with pytest.raises(kind) as e:
        await asyncio.wait_for(prefill.wait(), timeout)
    return str(e.value)


async def ended(rig: Rig, name: str = "r1", timeout: float = 5.0) -> BaseException | None:
    """How the handler of that request ended."""
    async with asyncio.timeout(timeout):
        while name not in rig.ended:
            await asyncio.sleep(0.002)
    return rig.ended[name]


class Gate:
    """A handler that sends the first part, waits, and sends the rest."""

    def __init__(self, rig: Rig, part: float = 0.5) -> None:
        self.rig, self.part = rig, part
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        rig.handler = self

    async def __call__(self, stream) -> None:
        num_tokens = len(stream.request.tokens)
        state = self.rig.states[stream.request.request_id] = State(self.rig.layout, num_tokens)
        segments = state.segments(stream.request.start, num_tokens)
        await stream.accept(0)
        await stream.started(time.monotonic())
        for i, segment in enumerate(segments):
            if i == int(len(segments) * self.part):
                self.reached.set()
                await self.go.wait()
            await stream.send_segment(segment)
            await stream.progress(segment.stop)
        await stream.complete(num_tokens, 0.25)


# ---- links


@on_loops("uvloop", "asyncio")
@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_data_link_cut_in_the_middle_loses_nothing(codec):
    async with rigged(proxy=True) as rig:
        rig.proxy.cut_at = {1: ALL // 4}
        prefill, sink = rig.ask(BIG, codec=codec)
        await rig.finish(prefill, sink)
        assert rig.proxy.is_cut.is_set() and rig.client.status()["num_sessions"] == 1
        assert await ended(rig) is None


@on_uvloop
async def test_only_data_link_cut_comes_back():
    async with rigged(proxy=True, options=replace(FAST, data_links=1)) as rig:
        rig.proxy.cut_at = {1: ALL // 3}
        prefill, sink = rig.ask(BIG)
        await rig.finish(prefill, sink)
        assert rig.proxy.is_cut.is_set() and len(rig.proxy.writers) == 3


@on_loops("uvloop", "asyncio")
@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_whole_session_cut_in_the_middle_resumes(codec):
    async with rigged(proxy=True) as rig:
        rig.proxy.cut_all_at = {1: ALL // 4}
        prefill, sink = rig.ask(BIG, codec=codec)
        await rig.finish(prefill, sink)
        assert rig.proxy.cuts == 1 and rig.client.status()["num_sessions"] == 2
        assert rig.client.status()["bytes_in"] > ALL // 2, "lost links count too"
        assert len(rig.streams) == 1 and await ended(rig) is None, "the same handler went on"


@on_uvloop
async def test_session_cut_again_and_again():
    async with rigged(proxy=True) as rig:
        gate = Gate(rig)
        prefill, sink = rig.ask(BIG)
        await gate.reached.wait()
        for sessions in range(2, 6):
            rig.proxy.cut()
            await rig.state("down")
            await rig.state("ready")
            assert rig.client.status()["num_sessions"] == sessions
        gate.go.set()
        await rig.finish(prefill, sink)


@on_uvloop
async def test_session_cut_while_the_answer_to_resume_is_on_its_way():
    async with rigged(proxy=True, options=replace(FAST, lease_s=10.0)) as rig:
        gate, lost = Gate(rig), []
        prefill, sink = rig.ask(BIG)
        await gate.reached.wait()
        while not prefill.progress.accepted_at:
            await asyncio.sleep(0.01)

        def mangle(index, data):
            if bytes((*MAGIC, VERSION, FrameType.ACCEPTED)) in data and not lost:  # Accepted
                lost.append(index)
                rig.proxy.cut(index)
                return b""
            return data

        rig.proxy.mangle = mangle
        rig.proxy.cut()
        await rig.state("down")
        while not lost or rig.client.state != "ready":
            await asyncio.sleep(0.01)
        gate.go.set()
        await rig.finish(prefill, sink)
        assert len(rig.streams) == 1


@on_uvloop
async def test_session_cut_before_accept_asks_again():
    async with rigged(proxy=True) as rig:
        asked = asyncio.Event()

        async def handler(stream):
            if len(rig.streams) == 1:
                asked.set()
                await asyncio.Event().wait()
            await rig.serve(stream)

        rig.handler = handler
        prefill, sink = rig.ask(300)
        await asked.wait()
        rig.proxy.cut()
        await rig.finish(prefill, sink)
        assert len(rig.streams) == 2


@on_uvloop
async def test_lease_ends_at_both_ends_when_nobody_comes_back():
    async with rigged(proxy=True, options=replace(FAST, lease_s=0.3, gone_after_s=60)) as rig:
        gate = Gate(rig)
        prefill, _ = rig.ask(BIG)
        await gate.reached.wait()
        rig.proxy.target = 1
        rig.proxy.cut()
        assert "lease of 0.3 s" in await failure(prefill, LinkLost)
        assert isinstance(await ended(rig), asyncio.CancelledError)
        assert rig.streams[0].staged_bytes == 0
        with pytest.raises(LinkLost):
            rig.ask(10)


@on_uvloop
async def test_complete_raises_when_the_lease_ends():
    async with rigged(proxy=True, options=replace(FAST, lease_s=0.3, gone_after_s=60)) as rig:
        completing = asyncio.Event()

        async def handler(stream):
            await stream.accept(0)
            await stream.started(time.monotonic())
            rig.proxy.flowing.clear()
            await rig.send(stream)
            completing.set()
            await stream.complete(len(stream.request.tokens), 0.0)

        rig.handler = handler
        rig.ask(BIG)
        await completing.wait()
        rig.proxy.target = 1
        rig.proxy.cut()
        assert isinstance(await ended(rig), LinkLost)


@on_uvloop
async def test_detached_stream_waits_instead_of_computing_on():
    async with rigged(proxy=True, options=replace(FAST, reconnect_min_s=0.2, reconnect_max_s=0.2)) as rig:
        attached, asked = [], []

        async def handler(stream):
            await stream.accept(0)
            await stream.started(time.monotonic())
            while not asked[0].progress.first_chunk_at:
                await asyncio.sleep(0)
            rig.proxy.cut()
            while stream.is_attached:
                await asyncio.sleep(0)
            attached.append(stream.is_attached)
            await stream.wait_staged_below(1 << 30)
            attached.append(stream.is_attached)
            await rig.send(stream)
            await stream.complete(len(stream.request.tokens), 0.0)

        rig.handler = handler
        prefill, sink = rig.ask(300)
        asked.append(prefill)
        await rig.finish(prefill, sink)
        assert attached == [False, True]


@on_uvloop
async def test_restarted_peer_fails_streams_at_once():
    async with rigged(proxy=True, options=replace(FAST, lease_s=60.0)) as rig:
        gate = Gate(rig)
        prefill, _ = rig.ask(BIG)
        await gate.reached.wait()
        other = await rig.start_server(end("prefill", "prefill-2"))
        rig.proxy.target = other.port
        rig.proxy.cut()
        assert "another process" in await failure(prefill, LinkLost, timeout=2)
        await rig.state("ready")
        assert rig.client.status()["instance_id"] == "prefill-2"
        rig.handler = rig.serve
        prefill, sink = rig.ask(300, name="r2")
        await rig.finish(prefill, sink)
        await other.close()


@on_uvloop
async def test_port_that_refuses_is_a_peer_that_is_gone():
    async with rigged(proxy=True, options=replace(FAST, lease_s=60.0)) as rig:
        gate = Gate(rig)
        prefill, _ = rig.ask(BIG)
        await gate.reached.wait()
        rig.proxy._server.close()
        rig.proxy.cut()
        assert "is gone" in await failure(prefill, LinkLost, timeout=3)
        assert rig.client.state == "down" and "refused" in rig.client.reason


@on_uvloop
async def test_restarted_client_frees_its_old_streams():
    async with rigged(proxy=True, options=replace(FAST, lease_s=60.0)) as rig:
        gate = Gate(rig)
        rig.ask(BIG)
        await gate.reached.wait()
        rig.client._dialer.options = replace(FAST, reconnect_min_s=60, reconnect_max_s=60)
        rig.proxy.cut()
        from common.net.pool import PeerClient

        again = PeerClient("peer", "127.0.0.1", rig.proxy.port, local=end("decode", "decode-2"), options=FAST)
        await again.start()
        assert isinstance(await ended(rig), asyncio.CancelledError)
        await again.close()


@on_uvloop
async def test_closing_either_end_does_not_wait_for_a_lease():
    async with rigged(options=replace(FAST, lease_s=60.0)) as rig:
        gate = Gate(rig)
        prefill, _ = rig.ask(BIG)
        await gate.reached.wait()
        await rig.server.close()
        await failure(prefill, LinkLost, timeout=2)
        assert isinstance(await ended(rig), asyncio.CancelledError)
    async with rigged(options=replace(FAST, lease_s=60.0)) as rig:
        gate = Gate(rig)
        prefill, _ = rig.ask(BIG)
        await gate.reached.wait()
        await rig.client.close()
        await failure(prefill, PeerCancelled, timeout=2)
        assert isinstance(await ended(rig), asyncio.CancelledError)


# ---- silence


@on_uvloop
async def test_idle_session_that_opens_again_before_the_server_noticed_stays_known():
    async with rigged() as rig:
        old = rig.client
        again = PeerClient(old.name, old.host, old.port, local=old.local, options=old.options)
        await again.start()
        try:
            async with asyncio.timeout(5):
                while again.state != "ready":
                    await asyncio.sleep(0.01)
            assert len(rig.server.sessions) == 1
        finally:
            await again.close()


@on_loops("uvloop", "asyncio")
async def test_idle_links_stay_up_and_measure_rtt():
    async with rigged(options=replace(FAST, heartbeat_s=0.05)) as rig:
        states = []
        rig.client.on_state = lambda c: states.append(c.state)
        links = [rig.client._dialer.control, *rig.client._dialer.data.values()]
        before = [link.connection.bytes_in for link in links]
        async with asyncio.timeout(5):
            while any(link.connection.bytes_in < b + 200 for link, b in zip(links, before, strict=True)):
                await asyncio.sleep(0.01)
        assert states == [] and 0 <= rig.client.status()["rtt_s"] < 0.05
        assert rig.client.status()["num_sessions"] == 1


@on_uvloop
async def test_silent_peer_is_lost_after_two_and_a_half_heartbeats():
    async with rigged(proxy=True, options=replace(FAST, heartbeat_s=0.2)) as rig:
        loop = asyncio.get_running_loop()
        rig.proxy.flowing.clear()
        stalled_at = loop.time()
        await rig.state("down")
        assert 0.2 < loop.time() - stalled_at < 1.5
        assert "nothing was heard" in rig.client.reason
        rig.proxy.cut()
        rig.proxy.flowing.set()
        await rig.state("ready")


# ---- cancel, refuse, drain


@on_loops("uvloop", "asyncio")
async def test_cancel_stops_the_handler_and_leaves_others_alone():
    async with rigged() as rig:
        gate = Gate(rig)
        prefill, sink = rig.ask(BIG)
        await gate.reached.wait()
        rig.handler = rig.serve
        other, other_sink = rig.ask(2000, name="r2")
        prefill.cancel()
        prefill.cancel()
        await asyncio.wait_for(prefill.closed(), 1)
        await failure(prefill, PeerCancelled, timeout=1)
        before = len(sink.landings)
        assert isinstance(await ended(rig, timeout=1), asyncio.CancelledError)
        assert rig.streams[0].staged_bytes == 0 and rig.streams[0].is_over
        await rig.finish(other, other_sink)
        assert len(sink.landings) == before and rig.client.num_streams == 0
        with pytest.raises(PeerCancelled):
            await rig.streams[0].send_segment(rig.states["r1"].segments(0, BIG)[0])


@on_uvloop
async def test_cancel_while_bytes_are_flowing_writes_nothing_afterwards():
    async with rigged() as rig:
        for i in range(10):
            prefill, sink = rig.ask(BIG, name=f"r{i}", codec="zstd" if i % 2 else "raw")
            landed = asyncio.Event()
            sink.landed = lambda *_, event=landed: event.set()
            await asyncio.wait_for(landed.wait(), 5)
            prefill.cancel()
            await asyncio.wait_for(prefill.closed(), 5)
            before = {k: bytes(v) for k, v in sink.memory.items()}
            await ended(rig, f"r{i}")
            assert {k: bytes(v) for k, v in sink.memory.items()} == before


@on_uvloop
async def test_refused_with_reason_and_retry_after():
    async with rigged() as rig:

        async def handler(stream):
            await stream.refuse(PeerShed("the queue is full: 64 of 64 (limits.max_queued_requests)", 2.5))

        rig.handler = handler
        prefill, _ = rig.ask(100)
        with pytest.raises(PeerShed, match="queue is full") as e:
            await asyncio.wait_for(prefill.wait(), 5)
        assert e.value.retry_after_s == 2.5


@on_uvloop
async def test_draining_is_a_state_and_ends():
    async with rigged() as rig:
        gate = Gate(rig)
        prefill, sink = rig.ask(BIG)
        await gate.reached.wait()
        rig.server.set_draining(True)
        await rig.state("draining")
        with pytest.raises(PeerDraining):
            rig.ask(10, name="r2")
        gate.go.set()
        await rig.finish(prefill, sink)
        rig.server.set_draining(False)
        await rig.state("ready")
        rig.handler = rig.serve
        prefill, sink = rig.ask(10, name="r3")
        await rig.finish(prefill, sink)


@on_uvloop
async def test_reconnected_client_learns_that_the_peer_drains():
    async with rigged(proxy=True) as rig:
        rig.server.set_draining(True)
        await rig.state("draining")
        rig.proxy.cut()
        await rig.state("down", "connecting")
        await rig.state("draining")


@on_uvloop
async def test_handler_errors_reach_the_client():
    async with rigged() as rig:

        async def engine_failed(stream):
            await stream.accept(0)
            await stream.fail(PeerEngineFailed("out of memory"))

        async def bug(stream):
            await stream.accept(0)
            raise ZeroDivisionError("oops")

        async def returns_early(stream):
            await stream.accept(0)

        for i, (handler, words) in enumerate(
            [(engine_failed, "out of memory"), (bug, "oops"), (returns_early, "ended early")]
        ):
            rig.handler = handler
            prefill, _ = rig.ask(100, name=f"r{i}")
            assert words in await failure(prefill, PeerEngineFailed)
        assert rig.client.state == "ready"


@on_uvloop
async def test_deadline():
    async with rigged() as rig:
        gate = Gate(rig)
        prefill, _ = rig.ask(BIG, deadline_s=0.2)
        assert "deadline of 0.2 s" in await failure(prefill, TransferTimeout)
        assert isinstance(await ended(rig), asyncio.CancelledError)
        assert gate.reached.is_set()


@on_uvloop
async def test_limits_of_the_client_itself():
    async with rigged(options=replace(FAST, max_prompt_tokens=1000, max_stream_bytes=100_000)) as rig:
        with pytest.raises(PromptTooLong, match="max_stream_bytes"):
            rig.ask(900)
        with pytest.raises(PromptTooLong, match="1000"):
            rig.ask(1001, start=1000)


# ---- corruption and garbage


@on_uvloop
@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_flipped_payload_bit_ends_that_prefill_only(codec):
    async with rigged(proxy=True, options=replace(FAST, data_links=1)) as rig:
        rig.proxy.flip_at = {1: rig.proxy.num_down[1] + 40_000}
        prefill, sink = rig.ask(BIG, codec=codec)
        other, other_sink = rig.ask(10, name="r2")
        text = await failure(prefill, TransferIncomplete)
        assert "digest" in text and prefill.report.verified_tokens < BIG
        await rig.finish(other, other_sink)
        assert isinstance(await ended(rig), asyncio.CancelledError)
        del sink


@on_uvloop
@pytest.mark.parametrize("offset", [0, 2, 3, 9, 14, 18, 23, 30])
async def test_flipped_header_byte_closes_the_link_and_the_transfer_goes_on(offset):
    """Of a data link; both ends are told why."""
    async with rigged(proxy=True) as rig:
        ours: list[str] = []
        theirs: list[tuple[str, str]] = []
        rig.client.on_lost = lambda client, closed: closed.is_fault and ours.append(closed.code)
        rig.server.on_lost = lambda closed, peer: closed.is_fault and theirs.append((closed.code, peer))
        rig.proxy.flip_at = {1: rig.proxy.num_down[1] + offset}
        prefill, sink = rig.ask(BIG)
        await rig.finish(prefill, sink)
        assert rig.proxy.flip_at == {} and rig.client.status()["num_sessions"] == 1
        assert (ours, theirs) == (["checksum"], [("checksum", "d")])


@on_uvloop
async def test_flipped_bit_of_a_token_is_refused_and_told_at_both_ends():
    async with rigged(proxy=True) as rig:
        refused: list[tuple[str, str, str]] = []
        rig.server.on_stream_refused = lambda event, peer: refused.append(
            (event.prefill.request_id, event.error.wire_code, peer)
        )
        rig.proxy.flip_last_up = 4 * BIG
        prefill, sink = rig.ask(BIG)
        assert "token_hash" in await failure(prefill, RequestDamaged)
        assert refused == [("r1", "damaged", "d")] and sink.landings == [] and rig.streams == []
        again, sink = rig.ask(BIG, name="r2")
        await rig.finish(again, sink)
        assert rig.client.status()["num_sessions"] == 1


@on_uvloop
@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(100), bytes(100_000), b"PF\x01\x02"]
)
async def test_strangers_on_the_port(data):
    async with rigged(options=replace(FAST, connect_timeout_s=0.5)) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        writer.write(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = await asyncio.wait_for(reader.read(), 5)
        assert len(answer) < 300 and b"weights" not in answer
        writer.close()
        prefill, sink = rig.ask(10)
        await rig.finish(prefill, sink)


@on_uvloop
async def test_crowd_that_never_speaks_keeps_nobody_out():
    """Far longer than a handshake takes the crowd would be let sit."""
    async with rigged(options=replace(FAST, connect_timeout_s=30.0)) as rig:
        crowd = [await asyncio.open_connection("127.0.0.1", rig.server.port) for _ in range(300)]
        assert len(rig.server._early) <= 129
        other = PeerClient("late", "127.0.0.1", rig.server.port, local=end("decode", instance="late"), options=FAST)
        await other.start()
        async with asyncio.timeout(5):
            while other.state != "ready":
                await asyncio.sleep(0.01)
        await other.close()
        for _, writer in crowd:
            writer.close()


@on_uvloop
async def test_crowd_that_never_speaks_is_bounded_and_leaves():
    async with rigged(options=replace(FAST, connect_timeout_s=0.5)) as rig:
        crowd = [await asyncio.open_connection("127.0.0.1", rig.server.port) for _ in range(140)]
        async with asyncio.timeout(10):
            await asyncio.gather(*(reader.read() for reader, _ in crowd))
        assert len(rig.server._early) == 0
        for _, writer in crowd:
            writer.close()
        prefill, sink = rig.ask(10)
        await rig.finish(prefill, sink)


# ---- this machine


@on_loops("uvloop", "asyncio")
async def test_no_descriptors_left_is_not_the_peers_fault():
    async with rigged() as rig:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            rig.client._dialer.data[1].abort()
            rig.client._dialer.control.abort()
            await rig.state("down")
            async with asyncio.timeout(5):
                while not rig.client.status()["is_local_error"]:
                    await asyncio.sleep(0.005)
            assert "this machine cannot open another connection" in rig.client.reason
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await rig.state("ready")
        assert rig.client.status()["is_local_error"] is False


@on_uvloop
@pytest.mark.parametrize("wait_s", [0.0, 0.4, 2.0])
async def test_a_proxy_that_forgets_idle_flows_costs_one_reconnection(wait_s):
    """Bytes vanish both ways and nobody is told: the request comes at once, or when heartbeats have noticed."""
    rig = Rig()
    rig.server = await rig.start_server()
    proxy = FaultProxy(rig.server.port, seed=1)
    rig.client = PeerClient("peer", "127.0.0.1", proxy.start(), local=end("decode", info=rig.info), options=FAST)
    await rig.client.start()
    try:
        async with asyncio.timeout(5):
            while rig.client.state != "ready":
                await asyncio.sleep(0.01)
        for _ in range(3):  # the control link and two data links
            proxy.harm("drop")
        await asyncio.sleep(wait_s)
        async with asyncio.timeout(5):
            while rig.client.state != "ready":
                await asyncio.sleep(0.01)
        prefill, sink = rig.ask(2000)
        await rig.finish(prefill, sink, timeout=10)
        assert rig.client.status()["num_sessions"] <= 2
        assert proxy.counts["drop"] == 3
    finally:
        await rig.client.close()
        await rig.server.close()
        await asyncio.to_thread(proxy.stop)
