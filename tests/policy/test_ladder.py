"""What is measured of a node, and what comes of it: lengths, medians, curves that rise, costs that are found again."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from common.policy.costs import DecodeCost, PrefillCost
from common.policy.ladder import (
    DecodeSample,
    PrefillSample,
    Samples,
    decode_facts,
    doubts,
    expected_s,
    ladder,
    measured_facts,
    prefill_facts,
    rising,
    was_idle,
)
from common.policy.profile import Curve, node_profile


@pytest.mark.parametrize(
    ("limit", "lengths"),
    [
        (16, (4, 8, 16)),
        (100, (25, 50, 100)),
        (300, (64, 128, 256)),
        (400, (64, 128, 256, 400)),
        (1024, (64, 128, 256, 512, 1024)),
    ],
)
def test_lengths_double_up_to_the_limit(limit, lengths):
    assert ladder(limit) == lengths


def test_every_ladder_has_a_length_for_each_term_and_stays_below_its_limit():
    for limit in range(16, 3000):
        lengths = ladder(limit)
        assert len(lengths) >= 3 and lengths[-1] <= limit
        assert all(b >= 1.5 * a for a, b in pairwise(lengths))
        assert limit < 1.5 * lengths[-1]
    with pytest.raises(ValueError, match="up to 15 tokens are too short to be measured, 16 is the least"):
        ladder(15)


def test_what_is_expected_lies_between_linear_and_quadratic():
    assert 4.0 < expected_s(PrefillSample(0, 100, 1.0), 400) < 16.0


def test_what_rises_stays_and_what_falls_is_averaged_with_its_neighbours():
    assert rising([(1, 1.0), (2, 2.0), (4, 2.0)]) == [(1, 1.0), (2, 2.0), (4, 2.0)]
    assert rising([(1, 3.0), (2, 1.0), (4, 5.0)]) == [(1, 2.0), (2, 2.0), (4, 5.0)]
    assert rising([(1, 3.0), (2, 2.0), (3, 1.0)]) == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_pooling_is_the_nearest_rising_curve():
    """Against many others that rise, on noise."""
    rng = random.Random(3)
    for _ in range(50):
        seconds = [rng.uniform(0, 3) for _ in range(5)]
        points = [(float(n), s) for n, s in enumerate(seconds)]
        found = [s for _, s in rising(points)]
        assert found == sorted(found)
        assert sum(found) == pytest.approx(sum(seconds))
        Curve(rising(points))
        off = sum((a - b) ** 2 for a, b in zip(found, seconds, strict=True))
        for _ in range(200):
            other = sorted(rng.uniform(0, 3) for _ in range(5))
            assert off <= sum((a - b) ** 2 for a, b in zip(other, seconds, strict=True)) + 1e-9


def measured(truth: PrefillCost, noise: float) -> Samples:
    rng, samples = random.Random(1), Samples()
    for tokens in ladder(4096):
        for _ in range(3):
            parts = [(0, tokens), (tokens // 2, tokens - tokens // 2)]
            for cached, uncached in parts if tokens > 256 else parts[:1]:
                seconds = truth.seconds(cached, uncached) * rng.uniform(1 - noise, 1 + noise)
                samples.prefill.append(PrefillSample(cached, uncached, seconds))
    return samples


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_costs_of_prefill_are_found_again(noise):
    truth = PrefillCost(0.02, 1e-3, 1.5e-7)
    profile = node_profile({"prefill": prefill_facts(measured(truth, noise))})
    for cached, uncached in ((0, 100), (0, 4000), (3000, 500)):
        found = profile.cost().seconds(cached, uncached)
        assert found == pytest.approx(truth.seconds(cached, uncached), rel=0.01 + noise)
    assert profile.prefill(2000) == pytest.approx(truth.seconds(0, 2000), rel=0.02 + noise)
    # Behind the longest prompt measured the cost goes on, the square too.
    assert profile.prefill(40_000) == pytest.approx(truth.seconds(0, 40_000), rel=0.05 + 2 * noise)


def test_costs_of_decode_steps_are_found_again():
    truth, samples = DecodeCost(0.02, 1e-3, 2e-6), Samples()
    for rows, context in product((1, 4, 16), (64, 2048)):
        samples.decode.append(DecodeSample(rows, rows * context, truth.step_s(rows, rows * context)))
    facts = decode_facts(samples, 16)
    assert facts == {"base_s": pytest.approx(0.02, rel=1e-3), "per_row_s": pytest.approx(1e-3, rel=1e-3),
                     "per_context_s": pytest.approx(2e-6, rel=1e-3), "max_rows": 16}  # fmt: skip


def test_the_median_counts_and_quiet_samples_before_others():
    samples = Samples([PrefillSample(0, 64, s) for s in (0.1, 9.0, 0.2)])
    samples.prefill += [PrefillSample(0, 128, s, is_quiet=False) for s in (7.0, 8.0)]
    samples.prefill += [PrefillSample(0, 128, 0.5)]
    assert prefill_facts(samples)["points"] == [[64, 0.2], [128, 0.5]]
    assert was_idle(samples) and doubts(samples) == []
    samples.prefill.append(PrefillSample(0, 256, 3.0, is_quiet=False))
    assert prefill_facts(samples)["points"][-1] == [256, 3.0]
    assert not was_idle(samples) and "under load" in doubts(samples)[0]
    assert measured_facts(samples)["prefill"][1] == {"cached": 0, "tokens": 128, "seconds": [7.0, 8.0, 0.5]}


def test_noise_is_told():
    samples = Samples([PrefillSample(0, tokens, s) for tokens, s in ((64, 0.3), (128, 0.2), (256, 0.9))])
    assert prefill_facts(samples)["points"] == [[64, 0.25], [128, 0.25], [256, 0.9]]
    assert doubts(samples) == ["seconds fell between prompts of 64 and 128 tokens: noise, which was averaged"]


@pytest.mark.parametrize(
    "prefill",
    [
        {"points": [[1, 1], [2, float("nan")]]},
        {"points": [[1, 1], [2, float("inf")]]},
        {"points": [[1, -1], [2, 1]]},
        {"points": [[1, 1], [10**400, 2]]},
        {"points": [], "constant_s": 0, "per_token_s": 1e-3},
        {"constant_s": float("inf"), "per_token_s": 1e-3},
        {"constant_s": 10**400, "per_token_s": 1e-3},
    ],
)
def test_figures_that_cannot_be_are_refused_by_name(prefill):
    with pytest.raises(ValueError, match="prefill"):
        node_profile({"prefill": prefill})
