"""Many prefills at once while links are cut, sessions reset and bits flipped at random: exact bytes or one typed error.

Afterwards nothing is left over at either end. Seeds are printed by pytest's ids; the long run is marked slow.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from common.errors import LinkLost, PeerCancelled, PeerError, TransferError
from tests.net.rig import FAST, Rig, on_uvloop, rigged
from tests.net.tls_ends import TlsEnds


async def trouble(rig: Rig, rng: random.Random, stop: asyncio.Event) -> None:
    """Until told to stop: something bad every few milliseconds of traffic."""
    while not stop.is_set():
        alive = [i for i, writers in enumerate(rig.proxy.writers) if not writers[0].is_closing()]
        what = rng.random()
        if alive and what < 0.5:
            rig.proxy.cut_at[rng.choice(alive)] = rng.randrange(200_000)
        elif alive and what < 0.7:
            rig.proxy.cut_all_at[rng.choice(alive)] = rng.randrange(2_000_000)
        elif alive and what < 0.8:
            index = rng.choice(alive)
            rig.proxy.flip_at[index] = rig.proxy.num_down[index] + rng.randrange(100_000)
        with_luck = asyncio.create_task(stop.wait())
        await asyncio.wait([with_luck], timeout=rng.uniform(0.01, 0.1))
        with_luck.cancel()


async def client_of(rig: Rig, rng: random.Random, name: str, outcomes: list[str]) -> None:
    num_tokens = rng.choice([1, 17, 300, 2000])
    async with asyncio.timeout(20):
        while rig.client.state != "ready":
            await asyncio.sleep(0.005)
    codec, start = rng.choice(["raw", "zstd"]), rng.choice([0, num_tokens // 2, num_tokens])
    try:
        prefill, sink = rig.ask(num_tokens, name=name, start=start, codec=codec)
    except LinkLost:
        outcomes.append("not ready")
        return
    if rng.random() < 0.1:
        asyncio.get_running_loop().call_later(rng.uniform(0, 0.02), prefill.cancel)
    try:
        await rig.finish(prefill, sink, timeout=30)
    except (PeerError, TransferError) as e:
        report = prefill.report
        assert start <= report.verified_tokens <= num_tokens
        expected = rig.states.get(name)
        if expected is not None and not isinstance(e, PeerCancelled):
            assert sink.equals(expected.sink, start, report.verified_tokens)
        outcomes.append(type(e).__name__)
    else:
        outcomes.append("ok")


async def storm(seed: int, num_prefills: int, options=FAST, **ends) -> list[str]:
    rng = random.Random(seed)
    outcomes: list[str] = []
    async with rigged(proxy=True, options=options, **ends) as rig:
        rig.chunk = 64
        stop = asyncio.Event()
        bad = asyncio.create_task(trouble(rig, rng, stop))
        todo = list(range(num_prefills))

        async def worker() -> None:
            while todo:
                await client_of(rig, rng, f"r{todo.pop()}", outcomes)

        await asyncio.gather(*(worker() for _ in range(8)))
        stop.set()
        await bad
        rig.proxy.cut_at.clear(), rig.proxy.cut_all_at.clear(), rig.proxy.flip_at.clear()
        async with asyncio.timeout(20):
            while rig.client.state != "ready" or any(s["num_streams"] for s in rig.server.sessions):
                await asyncio.sleep(0.01)
        assert rig.client.num_streams == 0 and len(outcomes) == num_prefills
        assert all(s.staged_bytes == 0 and s.is_over for s in rig.streams)
        assert rig.client._session._credit.outstanding_bytes == 0
        prefill, sink = rig.ask(500, name="last")
        await rig.finish(prefill, sink)
    return outcomes


@on_uvloop
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_storm(seed):
    outcomes = await storm(seed, 60)
    assert outcomes.count("ok") > 30, outcomes


@on_uvloop
async def test_storm_with_little_credit():
    outcomes = await storm(4, 60, replace(FAST, credit_bytes=50_000, max_segment_bytes=50_000))
    assert outcomes.count("ok") > 30, outcomes


@on_uvloop
@pytest.mark.parametrize("seed", [5, 6])
async def test_storm_over_sealed_links(seed, tmp_path):
    outcomes = await storm(seed, 60, **TlsEnds(tmp_path).both())
    assert outcomes.count("ok") > 30, outcomes


@pytest.mark.slow
@on_uvloop
@pytest.mark.parametrize("seed", range(10, 30))
async def test_long_storm(seed, tmp_path):
    outcomes = await storm(seed, 300, **(TlsEnds(tmp_path).both() if seed % 2 else {}))
    assert outcomes.count("ok") > 150, outcomes
