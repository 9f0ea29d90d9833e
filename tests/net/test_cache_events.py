"""What a server tells of its prefix cache: whole, in order, anew after every loss; and what a liar can do with it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from common.errors import BadMessage
from common.layout import StateLayout, StateSpec, TensorSpec
from common.sched.prefixes import Prefixes
from common.wire.holdings import MAX_RECORDS, RECORD_BYTES, Holding, cache_events, read_holdings
from common.wire.messages import MAX_HEADER_BYTES, CacheEvent, encode_frame
from decoded import directory
from decoded.directory import Directory
from tests.net.rig import FAST, on_uvloop, rigged

LAYOUT = StateLayout((StateSpec(0, "full", (TensorSpec("k", (1, 4), "float32"),)),))


def holding(number: int, groups: int = 1, num_tokens: int = 64) -> Holding:
    return Holding(number.to_bytes(16, "big"), bytes(16), 64 * 1000, num_tokens, groups, 0)


def test_records_go_round_in_messages_that_fit():
    told = [holding(n, n % 8, 1 + n % 64) for n in range(3 * MAX_RECORDS + 5)]
    events = list(cache_events(7, told, is_anew=True))
    assert [e.no for e in events] == [7, 8, 9, 10] and [e.is_anew for e in events] == [True, False, False, False]
    assert [h for e in events for h in read_holdings(e)] == told
    assert all(len(encode_frame(e)) < MAX_HEADER_BYTES for e in events)
    assert [(e.is_anew, e.records) for e in cache_events(0, [], is_anew=True)] == [(True, b"")]
    assert list(cache_events(0, [], is_anew=False)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 0}, {"num_tokens": 65}, {"stop": 63}, {"stop": 2**31}, {"groups": 8},
        {"window_first": 64000}, {"window_first": 63936}, {"window_first": 1},
    ],
)  # fmt: skip
def test_records_that_cannot_be_are_refused(change):
    wrong = holding(1)._replace(**change)
    [event] = cache_events(0, [holding(2), wrong], is_anew=False)
    with pytest.raises(BadMessage, match="no run of"):
        read_holdings(event)
    with pytest.raises(BadMessage, match="multiple of 42"):
        read_holdings(replace(event, records=event.records[:-1]))


class Told:
    """What a client heard."""

    def __init__(self) -> None:
        self.held: dict[bytes, Holding] = {}
        self.num_anew = 0

    def __call__(self, _client, holdings, *, is_anew):
        if is_anew:
            self.held.clear()
            self.num_anew += 1
        for each in holdings:
            if each.groups:
                self.held[each.name] = each
            else:
                self.held.pop(each.name, None)


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@on_uvloop
async def test_directory_and_truth_converge_after_losses():
    truth: dict[bytes, Holding] = {h.name: h for h in map(holding, range(1000))}
    rng, told = random.Random(1), Told()
    async with rigged(proxy=True) as rig:
        rig.server.cache = lambda: list(truth.values())
        rig.client.on_cache = told
        rig.proxy.cut()
        await rig.state("down")
        assert told.held == {}, "nobody knows what a peer holds that is away"
        await rig.state("ready")
        await until(lambda: told.held == truth)
        for _ in range(20):
            changes = []
            for _ in range(rng.randrange(1, 900)):
                each = holding(rng.randrange(2000), rng.randrange(2))
                changes.append(each)
                if each.groups:
                    truth[each.name] = each
                else:
                    truth.pop(each.name, None)
            rig.server.tell_cache(changes, is_anew=False)
            if rng.random() < 0.3:
                rig.proxy.cut()
                await rig.state("down")
                await rig.state("ready")
        await until(lambda: told.held == truth)
        assert told.num_anew > 2
        prefill, sink = rig.ask(100)
        await rig.finish(prefill, sink)


@on_uvloop
async def test_a_gap_or_nonsense_closes_the_link_and_all_is_told_anew():
    told = Told()
    async with rigged(options=FAST) as rig:
        rig.server.cache = lambda: [holding(1)]
        rig.client.on_cache = told
        for wrong in (CacheEvent(5, False, b""), CacheEvent(0, False, bytes(RECORD_BYTES))):
            before = rig.client.status()["num_sessions"]
            [peer] = rig.server._peers.values()
            peer.control.send(wrong)
            peer.control.flush()
            await until(lambda n=before: rig.client.status()["num_sessions"] > n)
            await until(lambda: len(told.held) == 1)


def test_a_directory_answers_for_each_peer_and_forgets():
    prompt, known = Prefixes(range(300)), Directory(LAYOUT)
    run = [Holding(prompt.block(n), prompt.block(n - 1), 64 * n, 64, 1, 0) for n in range(1, 5)]
    known.told("a", run, is_anew=True)
    known.told("b", run[:2], is_anew=True)
    assert [known.num_cached_tokens(p, prompt, 299) for p in ("a", "b", "c")] == [256, 128, 0]
    assert known.num_cached_tokens("a", None, 299) == 0 and known.num_cached_tokens("a", prompt, 200) == 192
    known.told("a", [run[1]._replace(groups=0)], is_anew=False)
    assert known.num_cached_tokens("a", prompt, 299) == 64
    known.told("a", [], is_anew=True)
    known.forget("b")
    assert known.num_entries("a") == known.num_entries("b") == 0


def test_a_directory_is_bounded_whatever_a_peer_says(monkeypatch):
    monkeypatch.setattr(directory, "MAX_ENTRIES", 100)
    known = Directory(LAYOUT)
    known.told("a", [holding(n) for n in range(250)], is_anew=True)
    assert known.num_entries("a") == 100 and known.num_ignored == 150
    rng = random.Random(2)
    for _ in range(3000):  # the same names now as this run of tokens, now as that one
        known.told("a", [holding(rng.randrange(90), rng.randrange(2), rng.randrange(1, 65))], is_anew=False)
    known.told("a", [holding(n, 0, rng.randrange(1, 65)) for n in range(250)], is_anew=False)
    assert known.num_entries("a") == 0
