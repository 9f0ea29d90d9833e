"""What decoded has of a prefix and a prefilld lacks crosses once, over real sockets, and is not computed again."""

from __future__ import annotations

import asyncio

import pytest

from common.backend import PrefillTask
from common.errors import RequestFailed
from common.net.options import RemoteRequest
from common.sched.prefix_index import ROWS, STATE, WINDOW
from tests.engine.kitchen import AMPLE, Discard, kept, num_computed, run
from tests.engine.wire_pair import WirePair


async def turn(pair: WirePair, request, tools, *, held: int | None = None):
    """Ask the source; it holds [0, held) of the prompt, as decoded believes, and gets the rest of what decoded has."""
    generation = await pair.decoder.open(request)
    start, last = generation.num_cached_tokens, request.num_prompt_tokens - 1
    known = pair.source.cache.find(generation.prefixes, start).num_tokens if held is None else held
    source = generation.source if known < start else None
    asked = RemoteRequest(
        "r", request.prompt_tokens[:last], start, pushes=source is not None, held=known if source is not None else 0
    )
    report = await pair.client.prefill(asked, generation.sink, source).wait()
    generation.import_done(last)
    ids = tools.ids([output async for output in generation])
    await kept(pair.decoder, tools)
    await kept(pair.source, tools)
    return ids, start, known, report


@pytest.mark.parametrize(
    "kind", ["fake", "Llama", "Gemma3Text", "KimiLinear", pytest.param("FalconH1", marks=pytest.mark.slow)]
)
async def test_answers_are_pushed_and_not_computed_again(make_kitchen, tools, kind):
    kitchen = make_kitchen(kind)
    decoder, source, plain = [await kitchen.backend(limits) for limits in (AMPLE, AMPLE, None)]
    async with WirePair(decoder, source) as pair:
        prompt = tools.prompt(150)
        for number in range(4):
            request = tools.request(prompt, max_tokens=70)
            _, [expected] = await run(plain, request, tools)
            before = num_computed(source)
            ids, start, known, report = await turn(pair, request, tools)
            assert ids == expected
            if number:
                assert start == len(prompt) - 21 and known < start
                assert report.pushed_raw_bytes == decoder.info.layout.transfer_bytes(known, start)
            assert report.num_cached_tokens == start
            assert num_computed(source) - before == len(prompt) - 1 - start, "only what is new"
            assert report.raw_bytes == decoder.info.layout.transfer_bytes(start, len(prompt) - 1)
            prompt = (*prompt, *ids, *tools.prompt(20, seed=number))
            if number == 1:  # a turn that stays with decoded
                request = tools.request(prompt, max_tokens=20)
                _, [ids] = await run(decoder, request, tools)
                prompt = (*prompt, *ids, *tools.prompt(20, seed=9))
                assert len(prompt) < 512
            if len(prompt) > 400:
                break
    await tools.until_idle(decoder, source, plain)


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "KimiLinear"])
@pytest.mark.parametrize("lost", [(ROWS, WINDOW, STATE), (STATE, WINDOW)])
async def test_a_directory_that_is_behind_costs_computing_alone(make_kitchen, tools, kind, lost):
    kitchen = make_kitchen(kind)
    decoder, source, plain = [await kitchen.backend(limits) for limits in (AMPLE, AMPLE, None)]
    async with WirePair(decoder, source) as pair:
        first = tools.request(tools.prompt(150), max_tokens=30)
        ids, *_ = await turn(pair, first, tools)
        second = tools.request((*first.prompt_tokens, *ids, *tools.prompt(20)), max_tokens=9)
        _, [expected] = await run(plain, second, tools)
        believed = source.cache.find((await source.cache.prefixes(second.prompt_tokens, b"")), 149).num_tokens
        assert believed > 0
        for part in source.cache.books.memory:
            if part.group in lost:
                source.cache.books.abandon(source.cache.books.memory, part)
        ids, start, _, report = await turn(pair, second, tools, held=believed)
        assert ids == expected and start > believed
        if ROWS in lost:
            assert report.num_cached_tokens == 0 and report.pushed_bytes == 0, "it did not ask for a prefix with a hole"
    await tools.until_idle(decoder, source, plain)


async def test_a_cache_that_fails_fails_the_job_and_nobody_waits(make_kitchen, tools):
    backend = await make_kitchen("fake").backend(AMPLE)
    await tools.transfer(backend, tools.prompt(200), Discard(backend))
    await kept(backend, tools)

    def fill(*_args):
        raise MemoryError("no room on the device")

    backend.cache.fill = fill
    job = backend.prefill(PrefillTask("r", tools.prompt(200), 150, is_pushed=True, held=64))
    async with asyncio.timeout(10):
        assert not await job.wants_push()
        with pytest.raises(RequestFailed, match="no room on the device"):
            async for _ in job:
                pass
    job.release()
    generation = await backend.open(tools.request((*tools.prompt(200), 5)))
    generation.compute()
    with pytest.raises(RequestFailed, match="no room on the device"):
        async for _ in generation:
            pass
    await tools.until_idle(backend)
    assert all(not part.num_pins for part in backend.cache.books.memory)
