"""What several use of one thing, and what one of them can count on: max-min fair, and forgotten in a minute or two."""

from __future__ import annotations

import random

import pytest

from common.policy.usage import FORGET_S, Usage


def busy(parts: dict[str, float], *, until: float = 600.0, chunk_s: float = 1.0) -> Usage:
    """Each decoded has that part of the time, in chunks."""
    usage = Usage()
    for name, part in parts.items():
        now = 0.0
        while now < until:
            now += chunk_s / part
            usage.note(name, chunk_s, now)
    return usage


def test_the_average_is_the_part_of_the_time_whatever_chunks_last():
    for chunk_s in (0.05, 0.5, 2.0):
        usage = busy({"a": 0.6, "b": 0.25}, chunk_s=chunk_s)
        rates = usage.rates(600.0)
        assert rates["a"] == pytest.approx(0.6, rel=0.1)
        assert rates["b"] == pytest.approx(0.25, rel=0.1)


def test_no_node_is_ever_busier_than_all_the_time():
    rng, usage, now = random.Random(3), Usage(), 0.0
    for _ in range(2000):
        seconds = rng.choice((0.01, 1.0, 90.0, 1000.0))
        now += seconds
        usage.note(rng.choice("abc"), seconds, now)
        assert sum(usage.rates(now).values()) <= 1.0 + 1e-9


def test_alone_it_has_all_and_others_who_stop_are_forgotten():
    usage = busy({"a": 0.7})
    assert usage.share("a", 600.0) == 1.0
    assert usage.share("b", 600.0) == pytest.approx(0.5, abs=0.02)  # as the queue would give it
    shares = [usage.share("b", 600.0 + wait) for wait in (0, FORGET_S, 2 * FORGET_S, 6 * FORGET_S)]
    assert shares == sorted(shares)
    assert shares[1] == pytest.approx(1 - 0.7 / 2.718, abs=0.03)
    assert shares[-1] == 1.0, "a trace of what was is as good as nothing"


@pytest.mark.parametrize(
    ("others", "share"),
    [
        ({}, 1.0),
        ({"b": 0.3}, 0.7),
        ({"b": 1.0}, 1 / 2),
        ({"b": 0.5, "c": 0.5}, 1 / 3),
        ({"b": 0.2, "c": 0.8}, 0.4),  # c gives way as the queue makes it do
        ({"b": 0.2, "c": 0.3}, 0.5),
    ],
)
def test_it_can_count_on_what_others_leave_and_on_its_even_part_at_least(others, share):
    usage = busy(others, chunk_s=0.02) if others else Usage()
    assert usage.share("a", 600.0) == pytest.approx(share, abs=0.01)


def test_two_who_want_all_end_at_one_half_each():
    """Each works as much as it may count on: neither is starved, and what one leaves the other gets."""
    usage = Usage()
    for now in range(1, 1200):
        a = usage.share("a", float(now))
        b = min(0.3, usage.share("b", float(now))) if now > 600 else usage.share("b", float(now))
        whole = max(1.0, a + b)
        usage.note("a", a / whole, float(now))
        usage.note("b", b / whole, float(now))
        if now == 600:
            assert usage.share("a", 600.0) == pytest.approx(0.5, abs=0.01)
    assert usage.share("a", 1200.0) == pytest.approx(0.7, abs=0.01)
    assert usage.share("b", 1200.0) == pytest.approx(0.5, abs=0.01)


def test_a_budget_is_shared_alike_in_its_own_unit():
    usage = Usage()
    for now in range(1, 600):
        usage.note("b", 1.0, float(now), 30e6)
    assert usage.share("a", 600.0, 100e6) == pytest.approx(70e6, rel=0.02)
    assert usage.share("a", 600.0, 40e6) == pytest.approx(20e6, rel=0.02)


def test_users_that_come_and_go_are_not_kept():
    usage = Usage()
    for n in range(5000):
        usage.note(f"decoded{n}", 1.0, float(n))
    assert len(usage.rates(5000.0)) <= 10 * FORGET_S
