"""State over real sockets, on uvloop and on plain asyncio: every size bit-exact, credit, links, order of events."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from common.layout import StateLayout, StateSpec, TensorSpec
from tests.net.rig import FAST, WIDE, State, both_loops, one_row, rigged

SIZES = [0, 1, 511, 512, 4095, 4096, 65535, 65536, 65537, 1 << 20]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("size", SIZES)
@both_loops
async def test_every_size_is_bit_exact(size, codec):
    options = replace(FAST, max_segment_bytes=2 << 20)
    async with rigged(one_row(size), options) as rig:
        prefill, sink = rig.ask(1, codec=codec)
        report = await rig.finish(prefill, sink)
        assert report.wire_bytes <= report.raw_bytes == size


@pytest.mark.parametrize(("codec", "dtype"), [("raw", "uint8"), ("zstd", "float32"), ("zstd", "bfloat16")])
@both_loops
async def test_64_mib_in_one_segment(codec, dtype):
    size, width = 64 << 20, {"uint8": 1, "float32": 4, "bfloat16": 2}[dtype]
    options = replace(FAST, max_segment_bytes=size, piece_bytes=1 << 20, credit_bytes=size)
    async with rigged(one_row(size, dtype, width), options) as rig:
        prefill, sink = rig.ask(1, codec=codec)
        report = await rig.finish(prefill, sink, timeout=120)
        assert report.num_segments == 1 and report.codec == ("raw" if codec == "raw" else report.codec)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("start", [0, 999, 3000])
@both_loops
async def test_all_kinds_of_layers_over_three_links(codec, start):
    async with rigged(WIDE, replace(FAST, data_links=3)) as rig:
        prefill, sink = rig.ask(3000, start=start, codec=codec)
        report = await rig.finish(prefill, sink)
        assert report.codec == (codec if start < 3000 else "raw")
        if codec == "zstd" and start < 3000:
            assert report.wire_bytes < 0.95 * report.raw_bytes


@both_loops
async def test_segments_larger_than_the_limit_are_cut():
    options = replace(FAST, max_segment_bytes=20_000)
    layout = StateLayout(tuple(StateSpec(i, "full", (TensorSpec("k", (64,), "float32"),)) for i in range(4)))
    async with rigged(layout, options) as rig:
        rig.chunk = 500

        async def handler(stream):
            await stream.accept(0)
            await stream.started(time.monotonic())
            state = rig.states["r1"] = State(layout, 500)
            await stream.send_segment(state.segment(0, 10, (0, 1, 2, 3)))
            await stream.send_segment(state.segment(10, 500, (3, 1)))
            await stream.send_segment(state.segment(10, 500, (0, 2)))
            await stream.complete(500, 0.0)

        rig.handler = handler
        prefill, sink = rig.ask(500)
        report = await rig.finish(prefill, sink)
        assert report.num_segments > 25


@both_loops
async def test_eight_streams_with_credit_smaller_than_one_of_them():
    options = replace(FAST, credit_bytes=100_000, max_segment_bytes=50_000)
    async with rigged(WIDE, options) as rig:
        rig.chunk = 32
        asked = [rig.ask(2000, name=f"r{i}", codec="zstd" if i % 2 else "raw") for i in range(8)]
        reports = await asyncio.gather(*(rig.finish(p, s) for p, s in asked))
        assert all(r.wire_bytes > 10 * options.credit_bytes for r in reports)


@both_loops
async def test_hundred_small_prefills_at_once():
    async with rigged() as rig:
        asked = [rig.ask(5 + i, name=f"r{i}") for i in range(100)]
        await asyncio.gather(*(rig.finish(p, s) for p, s in asked))
        assert rig.client.num_streams == 0


@both_loops
async def test_every_data_link_carries_pieces():
    async with rigged(WIDE, replace(FAST, data_links=3)) as rig:
        links = list(rig.client._dialer.data.values())
        before = [link.connection.bytes_in for link in links]
        prefill, sink = rig.ask(8000)
        await rig.finish(prefill, sink)
        moved = [link.connection.bytes_in - b for link, b in zip(links, before, strict=True)]
        assert len(moved) == 3 and min(moved) > 100_000, moved


@both_loops
async def test_trace_tells_the_story_of_each_segment_in_order():
    async with rigged() as rig:
        prefill, sink = rig.ask(2000, codec="zstd")
        await rig.finish(prefill, sink)
        stories: dict[int, list[str]] = {}
        for event, fields in rig.trace:
            if "no" in fields:
                stories.setdefault(fields["no"], []).append(event)
        assert len(stories) == len(sink.landings)
        for story in stories.values():
            assert story[0] == "segment_encoded" and story[-1] == "segment_acked" and "piece_written" in story
        assert [e for e, _ in rig.trace].count("segment_ready") == len(stories)
        json.dumps(rig.trace)
        at = [f["at"] for _, f in rig.trace]
        assert at == sorted(at)


@both_loops
async def test_first_segment_lands_while_later_ones_are_not_computed_yet():
    async with rigged() as rig:
        compute, landed = asyncio.Event(), asyncio.Event()

        async def handler(stream):
            state = rig.states["r1"] = State(WIDE, 600)
            await stream.accept(0)
            await stream.started(time.monotonic())
            first, *others = state.segments(0, 600)
            await stream.send_segment(first)
            await compute.wait()
            for segment in others:
                await stream.send_segment(segment)
            await stream.complete(600, 0.0)

        rig.handler = handler
        prefill, sink = rig.ask(600)
        original = sink.landed
        sink.landed = lambda *where: (original(*where), landed.set())
        await asyncio.wait_for(landed.wait(), 5)
        assert len(sink.landings) == 1 and prefill.progress.num_segments == 1
        compute.set()
        await rig.finish(prefill, sink)


@both_loops
async def test_progress_and_report_are_filled():
    async with rigged() as rig:
        before = asyncio.get_running_loop().time() - 0.01
        prefill, sink = rig.ask(1000)
        first = prefill.progress
        report = await rig.finish(prefill, sink)
        last = prefill.progress
        assert first != last and last.num_computed_tokens == 1000 and last.wire_bytes == report.wire_bytes
        assert before <= report.requested_at <= report.accepted_at <= report.first_chunk_at <= report.verified_at
        assert report.first_byte_at <= report.last_byte_at <= report.verified_at
        assert report.prefill_ended_at <= report.verified_at
        assert report.prefill_s == 0.25 and 0 <= report.remote_queue_s < 1
        assert (report.num_tokens, report.verified_tokens) == (1000, 1000)


@both_loops
async def test_staged_bytes_fall_with_acknowledgements():
    async with rigged() as rig:
        seen = []

        async def handler(stream):
            await stream.accept(0)
            await stream.started(time.monotonic())
            await rig.send(stream)
            seen.append(stream.staged_bytes)
            await stream.wait_staged_below(1)
            seen.append(stream.staged_bytes)
            await stream.complete(len(stream.request.tokens), 0.0)

        rig.handler = handler
        prefill, sink = rig.ask(3000)
        await rig.finish(prefill, sink)
        assert seen[1] == 0 and seen[0] <= WIDE.transfer_bytes(0, 3000)


@both_loops
async def test_status_of_both_ends_is_plain_data():
    async with rigged() as rig:
        prefill, sink = rig.ask(500)
        await rig.finish(prefill, sink)
        status, (session,) = rig.client.status(), rig.server.sessions
        json.dumps([status, session])
        assert status["state"] == "ready" and status["num_links"] == 3 and status["instance_id"] == "prefill-1"
        assert status["identity"]["weights"] == "weights" and status["numerics"] == {"dtype": "float32"}
        assert status["load"] == {"num_queued": 3.0} and status["bytes_in"] > WIDE.transfer_bytes(0, 500)
        assert session["name"] == "d" and session["num_links"] == 3 and session["staged_bytes"] == 0


@both_loops
async def test_load_is_fresh_when_a_prefill_is_done():
    """The client's own prompt is in no queue any more, and that is told with its end, not at the next heartbeat."""
    async with rigged(options=replace(FAST, heartbeat_s=60.0)) as rig:
        rig.load["num_queued_tokens"] = 500.0
        prefill, sink = rig.ask(500)
        rig.load["num_queued_tokens"] = 7.0
        await rig.finish(prefill, sink)
        assert rig.client.load["num_queued_tokens"] == 7.0
