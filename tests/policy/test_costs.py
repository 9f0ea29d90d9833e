"""Predicted seconds of prefill and decode: by models fitted to what was measured."""

from __future__ import annotations

import random

import pytest

from common.policy.costs import (
    DecodeCost,
    DecodeFit,
    NonNegativeFit,
    PrefillCost,
    PrefillFit,
    StateSize,
)


def test_fit_learns_what_it_is_shown() -> None:
    truth = PrefillCost(0.4, 5e-5, 2e-10)
    fit = PrefillFit()
    assert fit.cost is None
    rng = random.Random(1)
    for _ in range(400):
        cached, uncached = rng.randrange(0, 50_000), rng.randrange(1, 60_000)
        fit.observe(cached, uncached, truth.seconds(cached, uncached) * rng.uniform(0.97, 1.03))
    assert fit.cost is not None
    for cached, uncached in ((0, 500), (0, 50_000), (30_000, 2_000)):
        assert fit.cost.seconds(cached, uncached) == pytest.approx(truth.seconds(cached, uncached), rel=0.03)


def test_fit_starts_at_the_profile_and_leaves_it() -> None:
    profile, truth = PrefillCost(0.4, 5e-5, 2e-10), PrefillCost(0.8, 1e-4, 4e-10)
    fit = PrefillFit(profile)
    assert fit.cost == profile
    for n in range(300):
        tokens = 200 + 137 * n
        fit.observe(0, tokens, truth.seconds(0, tokens))
    assert fit.cost is not None
    assert fit.cost.seconds(0, 20_000) == pytest.approx(truth.seconds(0, 20_000), rel=0.05)


def test_fit_follows_a_node_that_changes() -> None:
    fit = PrefillFit()
    for slow in (1.0, 3.0):
        for n in range(1500):
            tokens = 100 + (37 * n) % 20_000
            fit.observe(0, tokens, slow * (0.1 + 1e-4 * tokens))
    assert fit.cost is not None
    assert fit.cost.seconds(0, 10_000) == pytest.approx(3.3, rel=0.05)


def test_weights_are_never_negative() -> None:
    """A straight line through such points would start below zero."""
    fit = NonNegativeFit((0.0, 0.0), (1.0, 1000.0))
    for x, y in ((1000, 0.1), (2000, 0.9), (3000, 1.9), (4000, 2.8)):
        fit.observe((1.0, x), y)
    assert fit.weights[0] == 0.0
    assert fit.weights[1] > 0
    before = fit.weights
    fit.observe((1.0, 100.0), -5.0)
    assert fit.weights == before


def test_decode_fit() -> None:
    truth = DecodeCost(0.01, 0.002, 1e-7)
    fit = DecodeFit()
    for rows in range(1, 40):
        for context in (100, 1000, 20_000):
            fit.observe(rows, rows * context, truth.step_s(rows, rows * context))
    assert fit.cost is not None
    assert fit.cost.step_s(16, 16 * 5000) == pytest.approx(truth.step_s(16, 16 * 5000), rel=0.01)


def test_queue_and_state() -> None:
    cost = PrefillCost(1.0, 1e-3)
    assert cost.queue_s(3000, 3) == pytest.approx(6.0)
    assert (cost.queue_s(0, 0), cost.seconds(500, 0)) == (0.0, 0.0)
    state = StateSize(1000, 10)
    assert (state.num_bytes(100), state.num_bytes(100, 60), state.num_bytes(100, 100)) == (2000, 1400, 0)
