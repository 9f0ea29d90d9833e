"""What every backend must do, whatever stands behind it. Runs on the fake engine and on tiny torch models."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.backend import ChunkDone, ComputedSegment, PrefillTask, StateSink
from common.errors import EngineDead, RequestFailed, StartupError
from common.local_backend import LocalBackend
from common.request import PromptLogprobs, TokenOutput
from common.worker import WorkerOptions

LENGTHS = (1, 2, 15, 16, 17, 18, 31, 32, 33, 34, 64, 65, 66, 130)


async def test_remote_equals_local_at_every_length(lab, tools):
    decoder, source = await lab.backend(32), await lab.backend(20)
    for length in LENGTHS:
        request = tools.request(tools.prompt(length))
        local = await tools.local(decoder, request)
        remote = await tools.remote(decoder, source, request)
        assert tools.ids(local) == tools.ids(remote), length
        assert len(local) == 6
        assert local[-1].finish_reason == "length"
    await tools.until_idle(decoder, source)


@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 50), (7, 50), (40, 50), (49, 50), (0, 100), (90, 100)])
async def test_segments_are_exactly_what_the_layout_requires(lab, tools, start, length):
    source = await lab.backend(20)
    layout = source.info.layout
    job = source.prefill(PrefillTask("r", tools.prompt(length), start))
    items = [item async for item in job]
    rows: dict[int, list[int]] = {}
    for item in items:
        if isinstance(item, ComputedSegment):
            assert sum(b.nbytes for b in item.buffers) == layout.segment_bytes(item.start, item.stop, item.layers)
            assert len(item.buffers) == sum(len(layout.states[n].tensors) for n in item.layers)
            assert all(b.readonly and b.format == "B" and b.ndim == 1 for b in item.buffers)
            for layer in item.layers:
                rows.setdefault(layer, []).extend(range(item.start, item.stop))
    required = layout.required_segments(start, length)
    assert rows == {n: list(range(a, b)) for n, (a, b) in required.items()}
    segments = [i for i in items if isinstance(i, ComputedSegment)]
    assert [s.is_last for s in segments] == [False] * (len(segments) - 1) + [True]
    done = [i for i in items if isinstance(i, ChunkDone)]
    assert [(d.start, d.stop) for d in done] == [(a, min(a + 20, length)) for a in range(0, length, 20)]
    assert isinstance(items[-1], ChunkDone)
    job.release()
    await tools.until_idle(source)


async def test_exported_views_outlive_the_job_and_its_successors(lab, tools):
    source = await lab.backend(8)
    prompt = tools.prompt(100)
    job = source.prefill(PrefillTask("r", prompt))
    kept = []
    async for item in job:
        if isinstance(item, ComputedSegment):
            kept += [(view, bytes(view)) for view in item.buffers]
    job.release()
    async for _ in source.prefill(PrefillTask("s", tools.prompt(100, seed=5))):
        pass
    assert all(bytes(view) == copied for view, copied in kept)


async def test_partial_transfer_onto_rows_already_held(lab, tools):
    decoder, source = await lab.backend(32), await lab.backend(20)
    request = tools.request(tools.prompt(60))
    expected = tools.ids(await tools.local(decoder, request))
    generation = await decoder.open(request)
    sink = generation.sink
    # Rows [0, 40) come from one job (window layers keep none of them), the rest from one that is told so.
    states = decoder.info.layout.states
    async for item in source.prefill(PrefillTask("r", request.prompt_tokens[:40])):
        if isinstance(item, ChunkDone) or any(states[n].kind != "full" for n in item.layers):
            continue
        for target, view in zip(sink.buffers(item.start, item.stop, item.layers), item.buffers, strict=True):
            target[:] = view
        sink.landed(item.start, item.stop, item.layers)
    items = await tools.transfer(source, request.prompt_tokens[:-1], sink, start=40)
    assert all(i.start >= 40 for i in items if isinstance(i, ComputedSegment))
    generation.import_done(59)
    assert tools.ids([o async for o in generation]) == expected


async def test_batch_with_joins_and_leaves_equals_alone(lab, tools):
    decoder, source = await lab.backend(32, token_budget=8), await lab.backend(20)
    requests = [
        tools.request(tools.prompt(n, seed=n), max_tokens=m)
        for n, m in [(1, 20), (40, 3), (17, 12), (100, 5), (2, 1), (33, 30), (65, 2), (90, 9)]
    ]
    alone = [tools.ids(await tools.local(decoder, r)) for r in requests]

    async def one(index: int) -> list[int]:
        way = tools.local(decoder, requests[index]) if index % 2 else tools.remote(decoder, source, requests[index])
        return tools.ids(await way)

    together = await asyncio.gather(*(one(i) for i in range(len(requests))))
    assert together == alone
    await tools.until_idle(decoder, source)


async def test_seeded_sampling_is_the_same_on_every_route(lab, tools):
    decoder, source = await lab.backend(32), await lab.backend(20)
    request = tools.request(
        tools.prompt(50), num_choices=3, temperature=1.0, seed=11, top_p=0.95, logprobs=2, max_tokens=8
    )
    local = await tools.local(decoder, request)
    others = asyncio.gather(*(tools.local(decoder, tools.request(tools.prompt(n), max_tokens=20)) for n in (5, 30)))
    remote = await tools.remote(decoder, source, request)
    await others
    for choice in range(3):
        assert tools.ids(local, choice) == tools.ids(remote, choice)
        assert len(tools.ids(local, choice)) == 8
    assert tools.ids(local, 0) != tools.ids(local, 1)
    for a, b in zip(_by_place(local), _by_place(remote), strict=True):
        assert a.logprob.token_id == a.token_id
        assert a.logprob.logprob == pytest.approx(b.logprob.logprob, abs=1e-4)
        assert len(a.logprob.top) == 2
    await tools.until_idle(decoder)


def _by_place(outputs):
    return sorted(outputs, key=lambda o: (o.choice, o.num_output_tokens))


async def test_unseeded_sampling_differs(lab, tools):
    decoder = await lab.backend()
    request = tools.request(tools.prompt(20), temperature=1.0, max_tokens=12)
    runs = {tuple(tools.ids(await tools.local(decoder, request))) for _ in range(3)}
    assert len(runs) > 1


async def test_choices_of_a_greedy_request_are_equal(lab, tools):
    decoder, source = await lab.backend(), await lab.backend(20)
    for length in (1, 2, 40, 100):
        request = tools.request(tools.prompt(length), num_choices=3)
        local, remote = await tools.local(decoder, request), await tools.remote(decoder, source, request)
        found = [tools.ids(o, c) for o in (local, remote) for c in range(3)]
        assert all(f == found[0] for f in found), length
    await tools.until_idle(decoder, source)


async def test_max_tokens_one_is_one_token(lab, tools):
    decoder = await lab.backend()
    [output] = await tools.local(decoder, tools.request(tools.prompt(10), max_tokens=1))
    assert (output.num_output_tokens, output.finish_reason) == (1, "length")


async def test_eos_is_the_last_token_unless_ignored_or_too_early(lab, tools):
    decoder = await lab.backend()
    bias = {"logit_bias": ((2, 100.0),), "ignore_eos": False}
    [output] = await tools.local(decoder, tools.request(tools.prompt(10), **bias))
    assert (output.token_id, output.finish_reason) == (2, "stop")
    out = await tools.local(decoder, tools.request(tools.prompt(10), min_tokens=3, **bias))
    assert [o.token_id == 2 for o in out] == [False, False, False, True]
    assert out[-1].finish_reason == "stop"
    out = await tools.local(decoder, tools.request(tools.prompt(10), **(bias | {"ignore_eos": True})))
    assert [o.token_id for o in out] == [2] * 6


async def test_context_limit_ends_with_length(lab, tools):
    decoder = await lab.backend(64)
    limit = decoder.info.max_context
    out = await tools.local(decoder, tools.request(tools.prompt(limit - 3), max_tokens=50))
    assert len(out) == 3
    assert out[-1].finish_reason == "length"


async def test_prompts_that_can_never_fit_are_refused(lab, tools):
    decoder = await lab.backend()
    limit = decoder.info.max_context
    for prompt in (tools.prompt(limit), (), (-1,), (decoder.info.vocab_size,)):
        with pytest.raises(RequestFailed):
            await decoder.open(tools.request(prompt))
    for task in (PrefillTask("r", ()), PrefillTask("r", (5, 6), start=2), PrefillTask("r", tools.prompt(limit + 1))):
        with pytest.raises(RequestFailed):
            decoder.prefill(task)


async def test_cancelling_a_choice_ends_only_that_one(lab, tools):
    decoder = await lab.backend()
    generation = await decoder.open(tools.request(tools.prompt(10), num_choices=3, max_tokens=40))
    generation.compute()
    seen = {0: 0, 1: 0, 2: 0}
    async for output in generation:
        seen[output.choice] += 1
        if output.choice == 1 and output.num_output_tokens == 2:
            generation.cancel(1)
            generation.cancel(1)
    assert seen[0] == seen[2] == 40
    assert 2 <= seen[1] < 40
    await tools.until_idle(decoder)


@pytest.mark.parametrize("moment", ["opened", "sink", "prefill", "decode", "finished"])
async def test_cancel_at_any_moment_frees_the_state(lab, tools, moment):
    decoder = await lab.backend(8)
    generation = await decoder.open(tools.request(tools.prompt(200), max_tokens=100))
    if moment == "sink":
        generation.sink.buffers(0, 8, (0,)) if decoder.info.layout.states[0].kind == "full" else generation.sink
    if moment in ("prefill", "decode", "finished"):
        generation.compute()
    if moment == "decode":
        await anext(aiter(generation))
    if moment == "finished":
        assert len([o async for o in generation]) == 100
    generation.cancel()
    generation.cancel()
    rest = [o async for o in generation]
    assert not rest or moment == "decode"
    await tools.until_idle(decoder)


async def test_failed_transfer_falls_back_to_clean_memory(lab, tools):
    decoder, source = await lab.backend(32), await lab.backend(20)
    request = tools.request(tools.prompt(60))
    expected = tools.ids(await tools.local(decoder, request))
    full = next(n for n, s in enumerate(decoder.info.layout.states) if s.kind == "full")

    generation = await decoder.open(request)
    stale = generation.sink.buffers(0, 40, (full,))
    generation.compute()
    outputs = []
    async for output in generation:
        # A straggler of the failed transfer goes on writing; nobody may notice.
        for view in stale:
            view[:] = b"\xff" * view.nbytes
        outputs.append(output)
    assert tools.ids(outputs) == expected

    generation = await decoder.open(request)
    stale = generation.sink.buffers(0, 40, (full,))
    await tools.transfer(source, request.prompt_tokens[:-1], generation.sink)
    for view in stale:
        view[:] = b"\xff" * view.nbytes
    generation.import_done(59)
    assert tools.ids([o async for o in generation]) == expected
    await tools.until_idle(decoder, source)


@pytest.mark.parametrize("rest", ["here", "there", "nothing"])
async def test_what_was_verified_before_a_failure_is_kept(lab, tools, rest):
    """Where every layer can continue in the middle; `there`: another peer sends what is missing."""
    decoder, source = await lab.backend(32), await lab.backend(20)
    request = tools.request(tools.prompt(60))
    expected = tools.ids(await tools.local(decoder, request))
    if any(state.kind != "full" for state in decoder.info.layout.states):
        kept = 59  # a window's rows are sent only where the prompt ends
    else:
        kept = 59 if rest == "nothing" else 40
    generation, computed = await decoder.open(request), []
    await tools.transfer(source, request.prompt_tokens[:kept], generation.sink)
    generation.keep(kept)
    if rest == "there" and kept < 59:
        items = await tools.transfer(source, request.prompt_tokens[:-1], generation.sink, start=kept)
        assert all(i.start >= kept for i in items if isinstance(i, ComputedSegment))
        generation.import_done(59)
    else:
        prefill = decoder.executor.prefill
        decoder.executor.prefill = lambda chunk, on_layer: computed.append(chunk) or prefill(chunk, on_layer)
        generation.compute()
    assert tools.ids([o async for o in generation]) == expected
    assert sum(chunk.stop - chunk.start for chunk in computed) == (59 - kept if rest == "here" else 0)
    await tools.until_idle(decoder, source)


async def test_only_a_part_of_a_sink_can_be_kept(lab, tools):
    decoder, source = await lab.backend(32), await lab.backend(20)
    request = tools.request(tools.prompt(60))
    expected = tools.ids(await tools.local(decoder, request))
    generation = await decoder.open(request)
    with pytest.raises(RequestFailed, match="cannot be kept"):
        generation.keep(10)
    stale = generation.sink.buffers(58, 59, (0,))
    with pytest.raises(RequestFailed, match="60 tokens cannot be kept: 0 to 59 of a sink can"):
        generation.keep(60)
    generation.keep(0)
    sink = generation.sink
    for view in stale:
        view[:] = b"\xff" * view.nbytes
    await tools.transfer(source, request.prompt_tokens[:-1], sink)
    generation.keep(59)
    with pytest.raises(RequestFailed, match="cannot be kept"):
        generation.keep(58)
    generation.compute()
    assert tools.ids([o async for o in generation]) == expected


async def test_sink_refuses_what_is_outside_or_gone(lab, tools):
    decoder = await lab.backend()
    generation = await decoder.open(tools.request(tools.prompt(60)))
    sink = generation.sink
    assert isinstance(sink, StateSink)
    with pytest.raises(RequestFailed):
        sink.buffers(0, 100000, (0,))
    with pytest.raises(RequestFailed):
        generation.import_done(60)
    generation.cancel()
    await tools.until_idle(decoder)
    with pytest.raises(RequestFailed):
        sink.buffers(58, 59, (0,))


async def test_release_stops_within_one_chunk(lab, tools):
    source = await lab.backend(8)
    gate = tools.Gate(source)
    job = source.prefill(PrefillTask("r", tools.prompt(400)))
    await gate.entered()
    job.release()
    job.release()
    gate.open()
    assert [i async for i in job] == []
    await tools.until_idle(source)
    assert len(gate.lengths) == 1


async def test_paused_job_waits_and_others_do_not(lab, tools):
    source = await lab.backend(8)
    job = source.prefill(PrefillTask("r", tools.prompt(200)))
    job.set_paused(True)
    other = [i async for i in source.prefill(PrefillTask("s", tools.prompt(100)))]
    assert isinstance(other[-1], ChunkDone)
    stopped_at = source.stats().num_prompt_tokens
    other = [i async for i in source.prefill(PrefillTask("t", tools.prompt(100)))]
    assert source.stats().num_prompt_tokens == stopped_at + 100
    assert source.stats().num_waiting == 1
    job.set_paused(False)
    items = [i async for i in job]
    assert items[-1].stop == 200
    job.release()


async def test_short_job_waits_for_at_most_two_chunks_of_a_long_one(lab, tools):
    source = await lab.backend(8)
    gate = tools.Gate(source)
    long = source.prefill(PrefillTask("long", tools.prompt(400)))
    await gate.entered()
    short = source.prefill(PrefillTask("short", tools.prompt(8)))
    gate.open()
    for job in (short, long):
        items = [i async for i in job]
        assert isinstance(items[-1], ChunkDone)
        job.release()
    assert 8 in gate.lengths[:3]
    assert gate.lengths.count(400) == 50


async def test_prompt_logprobs_come_once_before_the_tokens(lab, tools):
    decoder = await lab.backend(16)
    for length in (1, 2, 40):
        prompt = tools.prompt(length)
        out = await tools.local(decoder, tools.request(prompt, prompt_logprobs=2, logprobs=0))
        assert isinstance(out[0], PromptLogprobs)
        assert all(isinstance(o, TokenOutput) for o in out[1:])
        assert out[0].logprobs[0] is None
        assert [e.token_id for e in out[0].logprobs[1:]] == list(prompt[1:])
        assert all(len(e.top) == 2 and e.logprob <= 0 for e in out[0].logprobs[1:])


async def test_prompt_logprobs_without_tokens(lab, tools):
    decoder = await lab.backend(16)
    [entry] = await tools.local(decoder, tools.request(tools.prompt(20), prompt_logprobs=0, max_tokens=0))
    assert isinstance(entry, PromptLogprobs)
    await tools.until_idle(decoder)


async def test_marks_are_in_order(lab, tools):
    decoder = await lab.backend()
    generation = await decoder.open(tools.request(tools.prompt(100)))
    generation.compute()
    async for _ in generation:
        pass
    marks = generation.marks
    stamps = [marks.opened_at, marks.prefill_started_at, marks.prefill_ended_at, marks.joined_at]
    assert stamps == sorted(stamps)
    assert stamps[0] > 0


async def test_state_bytes_is_what_open_reserves(lab, tools):
    decoder = await lab.backend()
    request = tools.request(tools.prompt(60), num_choices=2, max_tokens=9)
    generation = await decoder.open(request)
    await tools.settled(decoder)
    assert sum(decoder.stats().state_bytes.values()) == decoder.state_bytes(request.state_tokens, 2)
    generation.cancel()


async def test_close_ends_what_runs_with_engine_dead(lab, tools):
    backend = await lab.backend(8)
    held = await backend.open(tools.request(tools.prompt(60)))
    job = backend.prefill(PrefillTask("r", tools.prompt(400)))
    job.set_paused(True)
    await backend.close()
    with pytest.raises(EngineDead):
        async for _ in held:
            pass
    with pytest.raises(EngineDead):
        async for _ in job:
            pass
    with pytest.raises(EngineDead):
        await backend.open(tools.request(tools.prompt(10)))
    assert not backend.stats().is_alive


async def test_engine_that_cannot_start_says_why():
    def build():
        raise StartupError("no such device")

    with pytest.raises(StartupError, match="no such device"):
        await LocalBackend(build, WorkerOptions()).start()

    def crash():
        raise KeyError("oops")

    with pytest.raises(StartupError, match="KeyError"):
        await LocalBackend(crash, WorkerOptions()).start()


async def test_failure_of_one_sequence_spares_the_others(lab, tools, monkeypatch):
    backend = await lab.backend(8)
    inner = backend.executor.prefill

    def prefill(chunk, on_layer):
        if chunk.seq.tokens[0] == 5:
            raise RequestFailed("poisoned")
        return inner(chunk, on_layer)

    monkeypatch.setattr(backend.executor, "prefill", prefill)
    good = asyncio.create_task(tools.local(backend, tools.request(tools.prompt(60))))
    with pytest.raises(RequestFailed, match="poisoned"):
        await tools.local(backend, tools.request((5, *tools.prompt(30))))
    with pytest.raises(RequestFailed, match="poisoned"):
        async for _ in backend.prefill(PrefillTask("r", (5, 6, 7))):
            pass
    assert len(await good) == 6
    await tools.until_idle(backend)


async def test_unexpected_error_kills_the_engine(lab, tools, monkeypatch):
    backend = await lab.backend(8)

    def decode(rows, chunk=None):
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(backend.executor, "decode", decode)
    with pytest.raises(EngineDead, match="bus"):
        await tools.local(backend, tools.request(tools.prompt(20)))
    with pytest.raises(EngineDead):
        backend.prefill(PrefillTask("r", (5, 6, 7)))
    assert not backend.stats().is_alive


async def test_before_start_and_after_close_nothing_breaks(lab):
    def build():
        raise StartupError("no such device")

    unstarted = LocalBackend(build, WorkerOptions())
    assert unstarted.stats().state_bytes == {}
    assert not unstarted.stats().is_alive
    await unstarted.close()
    backend = await lab.backend()
    await backend.close()
    await backend.close()


async def test_progress_is_current_while_idle_and_stands_still_while_stuck(lab, tools):
    backend = await lab.backend(8)
    before = time.monotonic()
    await tools.settled(backend)
    await tools.until_idle(backend)
    gate = tools.Gate(backend)
    job = backend.prefill(PrefillTask("r", tools.prompt(20)))
    await gate.entered()
    stuck = backend.stats().last_progress_at
    assert before <= stuck == backend.stats().last_progress_at
    gate.open()
    async for _ in job:
        pass
    job.release()
    assert backend.stats().last_progress_at > stuck
