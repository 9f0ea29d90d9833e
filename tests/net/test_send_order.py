"""Whose state is sent first where several wait for the same links: whoever asked first, or can still be in time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from common.linkfacts import Sending
from common.net.options import LinkOptions
from common.net.pool import RemotePrefill
from common.net.server import ServerStream
from common.sched.deadlines import send_order
from tests.net.rig import WIDE, Rig, on_uvloop, rigged
from tests.wire.kit import Sink

NUM_TOKENS = 16_000  # 25 MB: what sockets and links hold is less than two of them
OPTIONS = LinkOptions(data_links=2, piece_bytes=65536, max_segment_bytes=1 << 20, credit_bytes=256 << 20)


Asked = dict[str, tuple[RemotePrefill, Sink]]


async def all_waiting(rig: Rig, asked: dict[str, dict[str, Any]]) -> Asked:
    """Ask for all, and let nothing flow until all wait whole."""
    assert rig.proxy is not None
    may_send = asyncio.Event()

    async def serve(stream: ServerStream) -> None:
        await stream.accept(0)
        await stream.started(time.monotonic())
        await may_send.wait()
        await rig.send(stream)
        await stream.complete(NUM_TOKENS, 0.25)

    rig.handler = serve
    prefills = {name: rig.ask(NUM_TOKENS, name=name, **changes) for name, changes in asked.items()}
    while not all(prefill.progress.first_chunk_at for prefill, _ in prefills.values()):
        await asyncio.sleep(0.01)
    rig.proxy.flowing.clear()
    may_send.set()
    while not all(stream.is_completing for stream in rig.streams):
        await asyncio.sleep(0.01)
    return prefills


async def order_of_ends(rig: Rig, prefills: Asked) -> list[str]:
    """Let all flow; names as they become complete, every byte compared."""
    assert rig.proxy is not None
    rig.proxy.flowing.set()
    ends: list[str] = []

    async def end(name: str) -> None:
        await rig.finish(*prefills[name])
        ends.append(name)

    await asyncio.gather(*map(end, prefills))
    return ends


@on_uvloop
async def test_states_go_one_after_the_other_as_they_were_asked_for():
    async with rigged(WIDE, OPTIONS, proxy=True) as rig:
        assert await order_of_ends(rig, await all_waiting(rig, {"a": {}, "b": {}, "c": {}})) == ["a", "b", "c"]


@on_uvloop
async def test_what_is_due_goes_first():
    async with rigged(WIDE, OPTIONS, proxy=True) as rig:
        for peer in rig.server._peers.values():
            peer.ordering.order = send_order
        asked = {"first": {"due_s": 10.0}, "late": {"due_s": 0.0}, "any": {}, "later": {"due_s": 50.0}}
        asked["soon"] = {"due_s": 20.0}
        assert await order_of_ends(rig, await all_waiting(rig, asked)) == ["first", "soon", "later", "any", "late"]


@on_uvloop
async def test_an_order_is_told_what_is_left_of_states_that_wait():
    told: list[Sending] = []

    def order(waiting, now):
        told.extend(waiting)
        return waiting

    async with rigged(WIDE, OPTIONS, proxy=True) as rig:
        [peer] = rig.server._peers.values()
        peer.ordering.order = order
        peer.ordering._path_bps = lambda: 8e6
        await order_of_ends(rig, await all_waiting(rig, {"a": {"due_s": 30.0}, "b": {}}))
    first, second = ([s for s in told if s.seq_id == n] for n in (1, 2))
    whole_s = WIDE.transfer_bytes(0, NUM_TOKENS) / 1e6
    assert first[0].left_s == second[0].left_s == whole_s and 0 < first[-1].left_s < whole_s
    assert first[0].due_at == first[0].arrived_at + 30.0 and second[0].due_at == float("inf")
    assert [s.left_s for s in first] == sorted((s.left_s for s in first), reverse=True)


@on_uvloop
async def test_a_state_that_waits_for_its_turn_is_not_stalled_while_others_move():
    async with rigged(WIDE, OPTIONS, proxy=True) as rig:
        prefills = await all_waiting(rig, {"a": {}, "b": {}, "c": {}})
        [peer] = rig.server._peers.values()
        first, _, last = rig.streams
        now = time.monotonic()
        for at, moved_at, stalled_s in ((now + 50, 0.0, 50), (now + 100, now + 99, 1), (now + 200, now + 99, 101)):
            peer._moved_at = moved_at
            assert last.stalled_s(at) == pytest.approx(stalled_s, abs=5)
            assert first.stalled_s(at) == pytest.approx(at - now, abs=5), "what it sent is not acknowledged"
        assert await order_of_ends(rig, prefills) == ["a", "b", "c"]
