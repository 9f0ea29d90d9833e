"""The order by due times: as many on time as any has, nobody starves, without times first come first served."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from math import inf
from random import Random

import pytest

from common.sched.deadlines import PATIENCE_S, in_order


@dataclass(slots=True)
class Prompt:
    """What the order looks at."""

    seq_id: int
    due_at: float = inf
    left_s: float = 1.0
    arrived_at: float = 0.0


def ordered(prompts: list[Prompt], now: float) -> list[Prompt]:
    return in_order(prompts, now, lambda p: p.left_s)


def order_of(prompts: list[Prompt], now: float) -> list[int]:
    return [p.seq_id for p in ordered(prompts, now)]


def num_on_time(prompts: list[Prompt], now: float) -> int:
    """How many are done by their time when served one after the other."""
    count = 0
    for prompt in prompts:
        now += prompt.left_s
        count += now <= prompt.due_at
    return count


@pytest.mark.parametrize("seed", range(40))
def test_no_order_has_more_on_time(seed: int) -> None:
    rng = Random(seed)
    now = rng.uniform(0, 3)
    prompts = [Prompt(n, rng.randint(0, 12) + rng.random(), rng.randint(1, 5) / 2) for n in range(rng.randint(1, 6))]
    found = ordered(prompts, now)
    best = max(num_on_time(list(each), now) for each in permutations(prompts))
    assert sorted(p.seq_id for p in found) == list(range(len(prompts)))
    assert num_on_time(found, now) == best


@pytest.mark.parametrize("now", [7.0, 29.0, 31.5, 7.0 + 2 * PATIENCE_S])
def test_without_times_it_is_the_order_of_arrival(now: float) -> None:
    prompts = [Prompt(n, left_s=5.0 * n, arrived_at=n) for n in (2, 0, 3, 1)]
    assert order_of(prompts, now) == [0, 1, 2, 3]


def test_whoever_has_no_time_gives_way_to_those_who_have() -> None:
    assert order_of([Prompt(0), Prompt(1, due_at=9.0)], 1.0) == [1, 0]


def test_the_longest_is_put_off_and_not_whoever_is_late_first() -> None:
    assert order_of([Prompt(0, 10.0, 9.0), Prompt(1, 10.5, 2.0), Prompt(2, 11.0, 2.0)], 0.0) == [1, 2, 0]


@pytest.mark.parametrize("due_at", [4.0, inf])
def test_whoever_was_put_off_long_enough_goes_first(due_at: float) -> None:
    late, timely = Prompt(0, due_at, 5.0), Prompt(1, 50.0, 1.0)
    until = PATIENCE_S + (due_at if due_at < inf else late.arrived_at)
    assert order_of([late, timely], until - 0.1) == [1, 0]
    assert order_of([late, timely], until) == [0, 1]


@pytest.mark.parametrize("due_at", [1.0, inf])
def test_a_flood_that_could_be_on_time_starves_nobody(due_at: float) -> None:
    """A long prompt that is late or has no time, and always short ones that can make it."""
    now, step_s = 0.0, 0.5
    done: dict[int, float] = {}
    waiting = [Prompt(0, due_at, 6.0)]
    for count in range(1, 200):
        waiting.append(Prompt(count, now + 2.0, step_s, now))
        first = ordered(waiting, now)[0]
        now += step_s
        waiting = [replace(p, left_s=p.left_s - step_s) if p is first else p for p in waiting]
        done |= {p.seq_id: now for p in waiting if p.left_s <= 0}
        waiting = [p for p in waiting if p.left_s > 0]
    until = PATIENCE_S + (due_at if due_at < inf else 0.0)
    assert 20 < done[0] <= until + 6.0 + step_s
    assert all(at <= n * step_s + 2.0 + PATIENCE_S + 6.0 for n, at in done.items() if n)
