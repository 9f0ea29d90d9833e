"""A prefix cache never changes a token: what was kept of other requests goes on exactly where it was left."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.backend import ChunkDone, ComputedSegment, PrefillTask
from common.disk_parts import _MAGIC, DiskPart, PartFiles
from common.layout import HASH_SCHEME
from common.local_backend import LocalBackend
from common.sched.prefix_index import ROWS, STATE, WINDOW
from tests.engine.kitchen import AMPLE, Discard, kept, num_computed, run

SLOW = ("DeepseekV3", "Qwen3_5Text", "FalconH1", "Lfm2")
KINDS = ("fake", "Llama", "Gemma3Text", "KimiLinear", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW))


@pytest.fixture(params=KINDS)
def kitchen(request, make_kitchen):
    return make_kitchen(request.param)


async def test_a_repeated_prompt_computes_nothing(kitchen, tools):
    cached, plain = await kitchen.backend(AMPLE), await kitchen.backend()
    for length in (1, 2, 63, 64, 65, 66, 127, 128, 129, 130, 200):
        request = tools.request(tools.prompt(length), max_tokens=5)
        _, expected = await run(plain, request, tools)
        assert await run(cached, request, tools) == (0, expected)
        before = num_computed(cached)
        assert await run(cached, request, tools) == (length - 1, expected), length
        assert num_computed(cached) == before
    await tools.until_idle(cached, plain)


async def test_the_next_turn_goes_on_behind_what_was_generated(kitchen, tools):
    cached, plain = await kitchen.backend(AMPLE), await kitchen.backend()
    for length, max_tokens in ((30, 20), (64, 64), (100, 33), (129, 70)):
        prompt = tools.prompt(length)
        for turn in range(4):
            request = tools.request(prompt, max_tokens=max_tokens)
            _, expected = await run(plain, request, tools)
            num_cached, found = await run(cached, request, tools)
            assert found == expected
            assert num_cached == (
                len(prompt) - 8 if turn else 0
            )  # all but the last output token and the seven new ones
            prompt = (*prompt, *found[0], *tools.prompt(7, seed=turn + 1))
    await tools.until_idle(cached, plain)


async def test_a_branch_is_served_from_its_second_request_on(kitchen, tools):
    cached, plain = await kitchen.backend(AMPLE), await kitchen.backend()
    common = tools.prompt(150)
    found = []
    for seed in range(4):
        request = tools.request((*common, *tools.prompt(40, seed=seed + 1)), max_tokens=4)
        num_cached, ids = await run(cached, request, tools)
        assert ids == (await run(plain, request, tools))[1]
        found.append(num_cached)
    # Recurrent state is kept at ends alone, until a request shows that others leave the path at a block's end.
    assert found == ([0, 0, 128, 128] if kitchen.is_recurrent else [0, 128, 128, 128])


async def test_other_tenants_find_nothing(kitchen, tools):
    backend = await kitchen.backend(AMPLE)
    request = tools.request(tools.prompt(140))
    mine = type(request)(**{name: getattr(request, name) for name in request.__slots__} | {"tenant": "a"})
    theirs = type(request)(**{name: getattr(request, name) for name in request.__slots__} | {"tenant": "b"})
    expected = await run(backend, mine, tools)
    assert await run(backend, theirs, tools) == expected and expected[0] == 0
    assert await run(backend, request, tools) == expected
    assert (await run(backend, mine, tools))[0] == (await run(backend, theirs, tools))[0] == 139


async def test_choices_and_their_ends_are_all_kept(kitchen, tools):
    backend, plain = await kitchen.backend(AMPLE), await kitchen.backend()
    prompt = tools.prompt(100)
    request = tools.request(prompt, num_choices=3, max_tokens=30, temperature=1.0, seed=5)
    _, choices = await run(backend, request, tools)
    assert choices == (await run(plain, request, tools))[1] and choices[0] != choices[1]
    for ids in choices:
        further = tools.request((*prompt, *ids, 7, 8), max_tokens=4)
        num_cached, found = await run(backend, further, tools)
        assert (num_cached, found) == (129, (await run(plain, further, tools))[1])


async def test_who_leaves_early_leaves_what_was_computed(kitchen, tools):
    backend = await kitchen.backend(AMPLE)
    prompt = tools.prompt(200)
    generation = await backend.open(tools.request(prompt, max_tokens=50))
    generation.compute()
    ids: list[int] = []
    async for output in generation:
        ids.append(output.token_id)
        if len(ids) == 20:
            break
    generation.cancel()
    await kept(backend, tools)
    further = await backend.open(tools.request((*prompt, *ids, 5, 6)))
    assert further.num_cached_tokens >= 200 + 19 - 63
    further.cancel()
    job = backend.prefill(PrefillTask("r", tools.prompt(300, seed=3)))
    async for item in job:
        if isinstance(item, ChunkDone) and item.stop >= 160:
            break
    job.release()
    await kept(backend, tools)
    again = await backend.open(tools.request((*tools.prompt(300, seed=3), 9)))
    assert again.num_cached_tokens >= 128
    again.cancel()
    await tools.until_idle(backend)


async def test_who_leaves_at_the_end_of_a_block_leaves_its_recurrent_state(make_kitchen, tools):
    backend = await make_kitchen("KimiLinear").backend(AMPLE, chunk_tokens=64)
    tokens = tools.prompt(300)
    job = backend.prefill(PrefillTask("r", tokens))
    async for item in job:
        if isinstance(item, ChunkDone) and item.stop == 128:
            job.set_paused(True)
            break
    await kept(backend, tools)
    job.release()
    await kept(backend, tools)
    again = await backend.open(tools.request((*tokens, 9)))
    assert again.num_cached_tokens >= 128 and again.num_cached_tokens % 64 == 0
    again.cancel()
    await tools.until_idle(backend)


@pytest.mark.parametrize("start", [0, 40, 64, 150, 199])
async def test_a_prefill_sends_what_it_found_like_what_it_computes(kitchen, tools, start):
    cached, plain = await kitchen.backend(AMPLE), await kitchen.backend()
    tokens = tools.prompt(200)
    for seen in (tokens[:97], tokens[:131]):
        await kept(cached, tools)
        await tools.transfer(cached, seen, Discard(cached))
    await kept(cached, tools)
    for _ in range(2):
        job, rows = cached.prefill(PrefillTask("r", tokens, start)), {}
        items = [item async for item in job]
        for item in items:
            if isinstance(item, ComputedSegment):
                assert sum(b.nbytes for b in item.buffers) == plain.info.layout.segment_bytes(
                    item.start, item.stop, item.layers
                )
                for layer in item.layers:
                    rows.setdefault(layer, []).extend(range(item.start, item.stop))
        required = plain.info.layout.required_segments(start, 200)
        assert {n: sorted(found) for n, found in rows.items()} == {
            n: list(range(*span)) for n, span in required.items()
        }
        assert [i.is_last for i in items if isinstance(i, ComputedSegment)][-1]
        assert isinstance(items[-1], ChunkDone) and items[-1].stop == 200
        job.release()
        await kept(cached, tools)
    assert items[-1].is_cached and [i for i in items if isinstance(i, ChunkDone)] == [items[-1]]


async def remote(decoder: LocalBackend, source: LocalBackend, request: Any, tools: Any) -> tuple[int, list[int]]:
    """As net/ does it: only what the decoder does not hold crosses."""
    generation = await decoder.open(request)
    start, last = generation.num_cached_tokens, request.num_prompt_tokens - 1
    if start < last:
        await tools.transfer(source, request.prompt_tokens[:last], generation.sink, start)
        generation.import_done(last)
    else:
        generation.compute()
    outputs = [output async for output in generation]
    await kept(decoder, tools)
    await kept(source, tools)
    return start, tools.ids(outputs)


async def test_a_chat_over_two_daemons(kitchen, tools):
    decoder, source, plain = [await kitchen.backend(limits) for limits in (AMPLE, AMPLE, None)]
    prompt = tools.prompt(90)
    for turn in range(4):
        request = tools.request(prompt, max_tokens=25)
        _, [expected] = await run(plain, request, tools)
        start, ids = await remote(decoder, source, request, tools)
        assert ids == expected
        assert start == (len(prompt) - 31 if turn else 0)
        prompt = (*prompt, *ids, *tools.prompt(30, seed=turn))
    await tools.until_idle(decoder, source, plain)


async def test_a_failed_transfer_falls_back_on_what_was_cached(kitchen, tools):
    decoder, plain = await kitchen.backend(AMPLE), await kitchen.backend()
    prompt = tools.prompt(230)
    await run(decoder, tools.request(prompt[:120], max_tokens=2), tools)
    request = tools.request(prompt, max_tokens=6)
    generation = await decoder.open(request)
    cached = generation.num_cached_tokens
    assert cached >= (119 if kitchen.is_recurrent else 64)
    sink = generation.sink
    for layer, (first, stop) in decoder.info.layout.required_segments(cached, 229).items():
        for view in sink.buffers(max(first, stop - 5), stop, (layer,)):
            view[:] = b"\xff" * len(view)
    generation.keep(cached)
    generation.compute()
    ids = tools.ids([output async for output in generation])
    assert [ids] == (await run(plain, request, tools))[1]
    await kept(decoder, tools)
    await tools.until_idle(decoder)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_tight_limits_and_many_at_once(kitchen, tools, seed):
    """Prompts of a tree, several at a time, in a cache for a fraction of them: tokens as without any."""
    plain = await kitchen.backend()
    layout, rng = plain.info.layout, random.Random(seed)
    row = {g: sum(s.num_bytes(1) for s in layout.states if s.kind in k) for g, k in GROUP_KINDS.items()}
    backend = await kitchen.backend({ROWS: 64 * 9 * row[ROWS], WINDOW: 64 * 4 * row[WINDOW], STATE: 3 * row[STATE]})
    stems = [tools.prompt(n, seed=n) for n in (70, 130, 190)]
    stems += [(*stems[1], *tools.prompt(90, seed=1)), (*stems[2], *tools.prompt(70, seed=2))]
    requests = []
    for _ in range(24):
        stem = rng.choice(stems)
        tail = tools.prompt(rng.randrange(1, 50), seed=rng.randrange(3))
        requests.append(
            tools.request((*stem[: rng.randrange(60, len(stem) + 1)], *tail), max_tokens=rng.randrange(1, 9))
        )
    expected = [(await run(plain, request, tools))[1] for request in requests]

    async def some(which: range) -> None:
        for n in which:
            assert (await run(backend, requests[n], tools))[1] == expected[n]

    await asyncio.gather(*(some(range(k, 24, 3)) for k in range(3)))
    cache = backend.cache
    assert cache is not None and cache.counts.num_lookups == 24
    for group, limit in cache.books.memory.limits.items():
        assert sum(p.num_bytes for p in cache.books.memory if p.group == group) <= limit
        assert all(not p.num_pins for p in cache.books.memory)
    await tools.until_idle(backend, plain)


GROUP_KINDS = {ROWS: ("full", "latent"), WINDOW: ("window",), STATE: ("recurrent",)}


async def test_disk_survives_a_restart_and_nothing_damaged_is_used(kitchen, tools, tmp_path: Path):
    plain = await kitchen.backend()
    request = tools.request(tools.prompt(200), max_tokens=20)
    _, expected = await run(plain, request, tools)
    disk = {"disk_limits": AMPLE, "files": PartFiles(tmp_path, "model")}
    first = await kitchen.backend(AMPLE, **disk)
    await run(first, request, tools)
    await first.close()
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    assert files and all(p.stat().st_mode & 0o777 == 0o600 for p in files)
    second = await kitchen.backend(AMPLE, **disk)
    before = num_computed(second)
    assert await run(second, request, tools) == (199, expected)
    assert num_computed(second) == before and second.cache.counts.disk_read_bytes > 0
    await second.close()
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[-1 - number % 50] ^= 0x40
        path.write_bytes(data)
    third = await kitchen.backend(AMPLE, **disk)
    assert await run(third, request, tools) == (0, expected)
    assert third.cache.counts.num_damaged > 0
    await third.close()
    (tmp_path / "model" / "zz").mkdir()
    (tmp_path / "model" / "zz" / "rubbish.1").write_bytes(b"not ours")
    some = next(p for p in tmp_path.rglob("*") if p.is_file() and "rubbish" not in p.name)
    some.write_bytes(some.read_bytes()[:40])
    fourth = await kitchen.backend(AMPLE, **disk)
    assert not (tmp_path / "model" / "zz" / "rubbish.1").exists() and not some.exists()
    assert (await run(fourth, request, tools))[1] == expected


async def test_a_full_disk_costs_computing_and_one_line(make_kitchen, tools, tmp_path: Path, caplog):
    class Full(PartFiles):
        def write(self, *_args: Any) -> DiskPart:
            raise OSError(errno.ENOSPC, "No space left on device")

    kitchen = make_kitchen("Llama")
    plain = await kitchen.backend()
    row = plain.info.layout.token_bytes
    disk = {"disk_limits": {ROWS: 64 * 30 * row}, "files": Full(tmp_path, "model")}
    backend = await kitchen.backend({ROWS: 64 * 5 * row}, **disk)
    for request in [tools.request(tools.prompt(260, seed=seed), max_tokens=2) for seed in (0, 1, 2, 0)]:
        assert (await run(backend, request, tools))[1] == (await run(plain, request, tools))[1]
    await backend.cache.settle()
    assert backend.cache.counts.num_disk_errors > 4 and backend.cache.books.disk.used[ROWS] == 0
    assert len([r for r in caplog.records if "could not be written" in r.message]) == 1


async def test_what_memory_gives_up_goes_to_disk(make_kitchen, tools, tmp_path: Path):
    kitchen = make_kitchen("Llama")
    plain = await kitchen.backend()
    row = plain.info.layout.token_bytes
    disk = {"disk_limits": {ROWS: 64 * 30 * row}, "files": PartFiles(tmp_path, "model")}
    backend = await kitchen.backend({ROWS: 64 * 5 * row}, **disk)
    requests = [tools.request(tools.prompt(260, seed=seed), max_tokens=2) for seed in range(4)]
    for request in requests:
        await run(backend, request, tools)
    for request in requests:
        num_cached, ids = await run(backend, request, tools)
        assert num_cached >= 256 and ids == (await run(plain, request, tools))[1]
    cache = backend.cache
    assert cache.books.memory.used[ROWS] <= 64 * 5 * row and cache.books.disk.used[ROWS] <= 64 * 30 * row
    assert cache.clear() > 0
    await cache.settle()
    await asyncio.to_thread(cache._threads.submit(lambda: None).result)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    assert (await run(backend, requests[0], tools))[0] == 0


async def test_prompt_logprobs_are_always_computed(kitchen, tools):
    if kitchen.kind == "fake":
        pytest.skip("the fake engine's log probabilities do not depend on the state")
    cached, plain = await kitchen.backend(AMPLE), await kitchen.backend()
    request = tools.request(tools.prompt(100), prompt_logprobs=1, max_tokens=2)
    for _ in range(2):
        found, expected = await tools.local(cached, request), await tools.local(plain, request)
        assert [e and e.token_id for e in found[0].logprobs] == [e and e.token_id for e in expected[0].logprobs]


async def test_who_does_not_use_the_cache_neither_finds_nor_leaves_anything(kitchen, tools):
    backend = await kitchen.backend(AMPLE)
    request = tools.request(tools.prompt(150), num_choices=2, max_tokens=70)
    aside = replace(request, uses_cache=False)
    _, expected = await run(backend, request, tools)
    counts, used = backend.cache.counts, dict(backend.cache.books.memory.used)
    before = replace(counts, stored_bytes=dict(counts.stored_bytes))
    assert await run(backend, aside, tools) == (0, expected)
    assert await run(backend, replace(aside, prompt_tokens=tools.prompt(150, seed=7)), tools) != (0, expected)
    for tokens in (request.prompt_tokens, tools.prompt(150, seed=8)):
        job = backend.prefill(PrefillTask("p", tokens, uses_cache=False))
        chunks = [i async for i in job if isinstance(i, ChunkDone)]
        assert (chunks[0].start, chunks[0].stop, chunks[0].is_cached) == (0, 32, False)
        job.release()
        await kept(backend, tools)
    assert backend.cache.counts == before
    assert backend.cache.books.memory.used == used
    assert (await run(backend, request, tools))[0] == 149


@pytest.mark.parametrize("bad", ["Infinity", "NaN", "1e400", '"5"', "1.5", "[" * 1000, "null"])
def test_a_damaged_header_on_disk_is_removed_and_counted(tmp_path, bad):
    files = PartFiles(tmp_path, "model")
    name = "00" * 16
    fields = (
        f'"scheme": "{HASH_SCHEME}", "name": "{name}", "parent": "{name}", "num_tokens": 64, "group": 1, "first": 0'
    )
    for field in ("stop", "group", "first"):
        path = tmp_path / "model" / "00" / f"{name}.1"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_MAGIC + f'{{{fields}, "digest": "", "{field}": {bad}}}\n'.encode() + b"rows")
        assert list(files.scan()) == [] and not path.exists()
    assert files.num_refused == 3


def test_a_pipe_among_the_files_is_not_waited_for(tmp_path):
    files = PartFiles(tmp_path, "model")
    (tmp_path / "model" / "00").mkdir(parents=True)
    os.mkfifo(tmp_path / "model" / "00" / f"{'00' * 16}.1")
    assert list(files.scan()) == [] and files.num_refused == 1
