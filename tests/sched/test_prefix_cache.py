"""The books of a prefix cache: the longest point found is the longest that there is, and limits hold whatever comes."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from common.layout import StateLayout, StateSpec, TensorSpec
from common.sched.prefix_cache import MAX_CHANGES, PrefixCache
from common.sched.prefix_index import ROWS, STATE, WINDOW, Entry, Holding, Needs, PrefixIndex
from common.sched.prefixes import Prefixes
from common.sched.tier import Part, Tier

NONE = Holding(0)
NEEDS = [
    Needs(ROWS, 0),
    Needs(ROWS | WINDOW, 100),
    Needs(ROWS | WINDOW, 64),
    Needs(ROWS | STATE, 0),
    Needs(ROWS | WINDOW | STATE, 200),
    Needs(STATE, 0),
    Needs(WINDOW, 130),
]


def prompt(num_tokens: int, seed: int = 0) -> Prefixes:
    return Prefixes([seed * 100_000 + n for n in range(num_tokens)])


def entry_at(prefixes: Prefixes, stop: int) -> Entry:
    num = stop % 64 or 64
    return Entry(prefixes.at(stop), prefixes.block((stop - num) // 64), stop, num)


def can_go_on(held: dict[int, Holding], needs: Needs, position: int) -> bool:
    """By the definition: `held` has what is held by where an entry ends."""
    if position == 0:
        return True
    stops = [*range(64, position + 1, 64), *([position] if position % 64 else [])]
    if needs.groups & ROWS and not all(held.get(stop, NONE).groups & ROWS for stop in stops):
        return False
    if needs.groups & STATE and not held.get(position, NONE).groups & STATE:
        return False
    first = max(0, position - needs.window + 1)
    reached = [stop for stop in stops if stop > first] if needs.groups & WINDOW else []
    mine = [held.get(stop, NONE) for stop in reached]
    return all(
        m.groups & WINDOW and m.window_first <= max(first, s - (s % 64 or 64))
        for m, s in zip(mine, reached, strict=True)
    )


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(NEEDS), st.integers(0, 500), st.data())
def test_the_longest_point_is_found(needs, num_tokens, data):
    prefixes, index = prompt(num_tokens), PrefixIndex(needs)
    tails = data.draw(st.lists(st.integers(1, max(1, num_tokens)), max_size=6))
    held = {}
    for stop in sorted({*range(64, num_tokens + 1, 64), *(t for t in tails if t <= num_tokens)}):
        groups = needs.groups & data.draw(st.sampled_from([0, 7, 7, 7, ROWS, WINDOW | ROWS, STATE, STATE | ROWS]))
        if groups:
            start = stop - (stop % 64 or 64)
            partly = data.draw(st.integers(start + 1, stop - 1)) if stop - start > 1 and data.draw(st.booleans()) else 0
            held[stop] = Holding(groups, partly if groups & WINDOW else 0)
            index.set(entry_at(prefixes, stop), held[stop])
    limit = data.draw(st.integers(0, num_tokens))
    possible = [p for p in range(limit + 1) if can_go_on(held, needs, p) and (p % 64 == 0 or p in held)]
    found = index.find(prefixes, limit)
    assert found.num_tokens == max(possible)
    if needs.groups & ROWS:
        whole = itertools.takewhile(lambda n: held.get(64 * n, NONE).groups & ROWS, range(1, limit // 64 + 1))
        assert found.num_row_tokens == 64 * len(list(whole))
    for stop in held:
        index.set(entry_at(prefixes, stop), NONE)
    assert index.find(prefixes, limit).num_tokens == 0 and len(index) == 0 and not index._tails


def test_tails_of_others_are_not_ours():
    index = PrefixIndex(Needs(ROWS, 0))
    ours, theirs = Prefixes([*range(64), 1, 2, 3, 4]), Prefixes([*range(64), 1, 2, 9, 9])
    index.set(entry_at(ours, 64), Holding(ROWS))
    index.set(entry_at(theirs, 67), Holding(ROWS))
    assert index.find(ours, 68).num_tokens == 64
    index.set(entry_at(ours, 66), Holding(ROWS))
    assert index.find(ours, 68).num_tokens == index.find(theirs, 66).num_tokens == 66
    assert index.find(theirs, 68).num_tokens == 67 and index.find(theirs, 65).num_tokens == 64


def store(cache: PrefixCache, prefixes: Prefixes, stop: int, sizes: dict[int, int], tier: Tier | None = None) -> int:
    """Keep all of [0, stop); answers how many parts found room."""
    tier, num = tier or cache.memory, 0
    for entry in cache.entries(prefixes, stop):
        for group, size in sizes.items():
            if not cache.wants(entry, group):
                continue
            part, _ = cache.reserve(tier, entry, group, size)
            if part is not None:
                cache.commit(tier, part, b"x" * size)
                num += 1
    return num


def check(cache: PrefixCache) -> None:
    """Index, tiers and limits agree."""
    for tier in (cache.memory, cache.disk):
        for group, limit in tier.limits.items():
            assert sum(p.num_bytes for p in tier if p.group == group) == tier.used[group] <= limit
    for entry, (groups, _) in cache.held():
        there = {p.group for tier in (cache.memory, cache.disk) for p in tier if p.entry == entry and p.payload}
        assert groups == sum(there) and (not cache.needs.groups & ROWS or groups & ROWS)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NEEDS), st.data())
def test_limits_hold_and_what_is_found_can_be_used(needs, data):
    sizes = {group: size for group, size in ((ROWS, 64), (WINDOW, 128), (STATE, 500)) if needs.groups & group}
    cache = PrefixCache(needs, {ROWS: 64 * 12, WINDOW: 128 * 6, STATE: 500 * 3}, {ROWS: 64 * 5, WINDOW: 0, STATE: 500})
    prompts = [prompt(data.draw(st.integers(1, 400)), seed) for seed in range(4)]
    prompts.append(prompts[0].extended(range(70)))
    pinned = []
    told: dict[bytes, Holding] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        prefixes = data.draw(st.sampled_from(prompts))
        action = data.draw(st.sampled_from(["store", "store", "use", "release", "drop", "demote"]))
        stop = data.draw(st.integers(0, len(prefixes)))
        if action == "store":
            store(cache, prefixes, stop, sizes)
        elif action == "demote":
            store(cache, prefixes, stop, sizes, cache.disk)
        elif action == "use":
            num = cache.find(prefixes, stop).num_tokens
            found = cache.use(prefixes, num, {g: needs.window_from(num) if g == WINDOW else 0 for g in sizes})
            assert found is not None and all(p.payload for _, p in found)
            pinned.append(found)
        elif action == "release" and pinned:
            cache.release(pinned.pop())
        elif action == "drop":
            for part in list(cache.memory)[:3]:
                cache.abandon(cache.memory, part)
        check(cache)
        for entry, holding in cache.take_changes() or ():
            told[entry.name] = holding
    assert {name: held for name, held in told.items() if held.groups} == {e.name: held for e, held in cache.held()}
    cache.clear()
    check(cache)
    assert not list(cache.held())


def test_a_path_is_given_up_from_its_end():
    cache = PrefixCache(Needs(ROWS, 0), {ROWS: 10 * 64})
    long, other = prompt(640, 1), prompt(192, 2)
    assert store(cache, long, 640, {ROWS: 64}) == 10
    assert store(cache, other, 192, {ROWS: 64}) == 3
    assert cache.find(long, 640).num_tokens == 7 * 64 and cache.find(other, 192).num_tokens == 192


def test_what_is_used_stays_and_what_is_pinned_cannot_go():
    cache = PrefixCache(Needs(ROWS, 0), {ROWS: 6 * 64})
    hot, cold, new = prompt(128, 1), prompt(128, 2), prompt(192, 3)
    store(cache, hot, 128, {ROWS: 64})
    store(cache, cold, 128, {ROWS: 64})
    for _ in range(5):
        cache.release(cache.use(hot, 128, {ROWS: 0}) or [])
    pinned = cache.use(cold, 64, {ROWS: 0}) or []
    assert store(cache, new, 192, {ROWS: 64}) == 3  # at the cost of neither the hot path nor the pinned block
    assert cache.find(hot, 128).num_tokens == 128 and cache.find(cold, 128).num_tokens == 64
    cache.release(pinned)
    check(cache)


def test_room_that_cannot_be_made_takes_nothing_away():
    tier = Tier({ROWS: 100})
    first, second = entry_at(prompt(64, 1), 64), entry_at(prompt(64, 2), 64)
    part = Part(first, ROWS, 60, b"x")
    tier.add(part)
    other = Part(second, ROWS, 40, b"x")
    tier.add(other)
    tier.use(part)
    third = entry_at(prompt(64, 3), 64)
    assert [tier.make_room(Part(third, *w, b"x")) for w in ((ROWS, 50), (ROWS, 101), (STATE, 1))] == [None] * 3
    assert tier.used[ROWS] == 100 and tier.get(second.name, ROWS) is other
    assert tier.make_room(Part(third, ROWS, 40, b"x")) == [other]


def test_rows_that_go_take_the_rest_of_the_entry_with_them():
    cache = PrefixCache(Needs(ROWS | STATE, 0), {ROWS: 64, STATE: 1000})
    store(cache, prompt(64, 1), 64, {ROWS: 64, STATE: 10})
    assert cache.memory.used == {ROWS: 64, STATE: 10}
    store(cache, prompt(64, 2), 64, {ROWS: 64})
    assert cache.memory.used == {ROWS: 64, STATE: 0} and cache.find(prompt(64, 1), 64).num_tokens == 0


def test_too_many_changes_are_told_anew():
    cache = PrefixCache(Needs(ROWS, 0), {ROWS: 64 * (MAX_CHANGES + 10)})
    store(cache, prompt(64 * (MAX_CHANGES + 1)), 64 * (MAX_CHANGES + 1), {ROWS: 64})
    assert cache.take_changes() is None and cache.take_changes() == []
    assert len(list(cache.held())) == MAX_CHANGES + 1


def test_eviction_costs_a_logarithm():
    """Ten times as many parts: each further one looks at about as many heap items."""

    def looked_at(num: int) -> float:
        tier, num_popped = Tier({ROWS: 64 * num}), 0
        for n in range(3 * num):
            entry = entry_at(prompt(64, n), 64)
            before = len(tier._heaps[ROWS])
            part = Part(entry, ROWS, 64, b"x")
            gone = tier.make_room(part) or []
            num_popped += before - len(tier._heaps[ROWS])
            assert len(gone) <= 1
            tier.add(part)
        return num_popped / num

    assert looked_at(2000) < 1.5 * looked_at(200) + 1


def test_a_layout_says_what_it_needs():
    kv = (TensorSpec("k", (1, 4), "float32"), TensorSpec("v", (1, 4), "float32"))
    specs = (StateSpec(0, "recurrent", kv), StateSpec(0, "latent", kv[:1]), StateSpec(1, "window", kv, window=77))
    assert Needs.of(StateLayout(specs)) == Needs(ROWS | WINDOW | STATE, 77)
    assert Needs.of(StateLayout(specs[:1])) == Needs(STATE, 0)
