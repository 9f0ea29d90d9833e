"""Segments leave while later layers of the same chunk are still to run."""

from __future__ import annotations

import pytest

from common.backend import ChunkDone, ComputedSegment, PrefillTask


@pytest.mark.parametrize("kind", ["tiny-full", "tiny-mixed"])
async def test_first_segment_is_out_before_the_last_layer_runs(make_lab, tools, monkeypatch, kind):
    source = await make_lab(kind).backend(20)
    emitted: list[ComputedSegment] = []
    seen_by_last_layer: list[int] = []
    inner = source.worker.call

    def call(function, argument):
        if isinstance(argument, ComputedSegment):
            emitted.append(argument)
        inner(function, argument)

    monkeypatch.setattr(source.worker, "call", call)
    last = source.executor._model.base_model.layers[-1]
    last.register_forward_pre_hook(lambda *_args: seen_by_last_layer.append(len(emitted)))

    items = [i async for i in source.prefill(PrefillTask("r", tools.prompt(100)))]
    done = [i for i in items if isinstance(i, ChunkDone)]
    assert len(done) == len(seen_by_last_layer) == 5
    before = [0] + [sum(s.stop <= d.stop for s in emitted) for d in done]
    for chunk, seen in enumerate(seen_by_last_layer):
        assert seen > before[chunk], f"nothing of chunk {chunk} had left when its last layer began"


async def test_segments_are_stamped_within_their_chunk(make_lab, tools):
    source = await make_lab("tiny-full").backend(20)
    segments, start = [], 0.0
    async for item in source.prefill(PrefillTask("r", tools.prompt(100))):
        if isinstance(item, ComputedSegment):
            segments.append(item)
            continue
        stamps = [s.computed_at for s in segments]
        assert [item.started_at, *stamps, item.ended_at] == sorted([item.started_at, *stamps, item.ended_at])
        assert item.started_at >= start
        segments, start = [], item.ended_at


async def test_decode_rows_do_not_wait_for_the_chunk_of_their_step(make_lab, tools):
    """A step hands out its rows' tokens before its chunk runs."""
    backend = await make_lab("fake").backend(8, token_budget=4)
    order: list[str] = []
    decode, prefill, call = backend.executor.decode, backend.executor.prefill, backend.worker.call
    backend.executor.decode = lambda rows, chunk: order.append("decode") or decode(rows, chunk)
    backend.executor.prefill = lambda chunk, hook: order.append("chunk") or prefill(chunk, hook)
    backend.worker.call = lambda f, a: order.append("out") or call(f, a)
    running = await backend.open(tools.request(tools.prompt(1), max_tokens=30))
    running.compute()
    stream = aiter(running)
    await anext(stream)
    await tools.local(backend, tools.request(tools.prompt(60), max_tokens=1))
    async for _ in stream:
        pass
    shared = [i for i, what in enumerate(order) if what == "chunk" and "decode" in order[max(0, i - 2) : i]]
    assert shared
    assert all(order[i - 1] == "out" for i in shared)
