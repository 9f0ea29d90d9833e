"""How fast a queue drains, and how far predictions are off."""

from __future__ import annotations

import random

import pytest

from common.policy.pace import MISS_RATE, MOST_RESERVE, DrainPace, Errors, Misses


def test_the_pace_is_that_of_the_times_in_which_something_waited():
    pace = DrainPace()
    assert pace.wait_s(100.0, 0.0) is None, "nobody knows yet"
    now = 0.0
    for _ in range(50):
        pace.begin(now)
        for _ in range(10):
            now += 0.5
            pace.note(10.0, now)
        pace.end()
        now += 1000.0  # nothing waits
    pace.begin(now)
    assert pace.wait_s(100.0, now) == pytest.approx(5.0 + 0.5)
    assert pace.wait_s(0.0, now) == pytest.approx(0.5), "until the next one starts"


def test_it_follows_a_change_and_notices_that_nothing_starts_any_more():
    pace = DrainPace()
    pace.begin(0.0)
    now = 0.0
    for step_s in (0.1, 1.0):
        for _ in range(100):
            now += step_s
            pace.note(10.0, now)
    assert pace.wait_s(100.0, now) == pytest.approx(10 + 1, rel=0.1)
    assert pace.wait_s(100.0, now + 1.0) == pytest.approx(10 + 1, rel=0.1), "the next one is not late yet"
    assert pace.wait_s(100.0, now + 60.0) > 60.0


def test_the_margin_covers_most_of_what_comes_later():
    rng, errors, late = random.Random(1), Errors(), 0
    for n in range(2000):
        error = rng.gauss(0.5, 0.2)
        late += n >= 200 and error > errors.margin_s
        errors.note(error)
    assert 0.0 < late / 1800 < 0.05
    before = errors.margin_s
    for _ in range(200):
        errors.fade()
    assert errors.margin_s < 0.1 * before, "where nobody is let in any more, somebody will be again"
    for _ in range(200):
        errors.note(-3.0)
    assert errors.margin_s == 0.0, "what comes early needs no margin, and is not counted on"


@pytest.mark.parametrize("spread", [0.05, 0.2])
def test_the_reserve_settles_where_few_deadlines_are_missed(spread):
    """Errors with a long tail, which mean and deviation do not tell of."""
    rng, misses, late = random.Random(1), Misses(), 0
    for n in range(8000):
        is_missed = spread * rng.paretovariate(4.0) - spread > misses.reserve
        late += n >= 2000 and is_missed
        misses.note(is_missed=is_missed)
    assert 0.3 * MISS_RATE < late / 6000 < 3 * MISS_RATE
    assert misses.reserve < MOST_RESERVE


def test_a_reserve_that_lets_nobody_in_does_not_last():
    misses = Misses()
    for _ in range(100):
        misses.note(is_missed=True)
    assert misses.reserve == MOST_RESERVE
    for _ in range(200):
        misses.fade()
    assert misses.reserve < 0.1 * MOST_RESERVE
