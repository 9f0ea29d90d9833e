"""The closed form: figures of the paper re-derived, the bisection against a brute-force grid, special cases."""

from __future__ import annotations

import math

import pytest

from common.policy.capacity import Model, Plant
from common.policy.costs import StateSize
from common.policy.lengths import Lengths
from common.policy.profile import Curve, Polynomial
from common.sim.plan import plant
from common.sim.scenario import PAPER, scenario


@pytest.fixture(scope="module")
def paper():
    return scenario(PAPER)


@pytest.fixture(scope="module")
def model(paper) -> Model:
    return Model(plant(paper), paper.lengths)


def test_optimum_is_the_papers(model):
    best = model.solve()
    assert best.threshold_tokens == pytest.approx(19_400, rel=0.02)
    assert (best.num_prefill, best.num_decode) == (3, 5)
    assert best.throughput_rps == pytest.approx(3.24, rel=0.01)
    assert best.offloaded == pytest.approx(0.496, abs=0.005)
    assert best.mean_long_tokens == pytest.approx(44_800, rel=0.01)
    rates = (best.theta_remote_rps, best.theta_own_rps, best.theta_decode_rps)
    assert rates == pytest.approx((1.61, 1.64, 3.91), rel=0.01)
    assert best.egress_bps == pytest.approx(12.3e9, rel=0.02)


@pytest.mark.parametrize(
    ("num_prefill", "expected"), [(1, 1.08), (2, 2.17), (3, 3.24), (4, 3.12), (5, 2.34), (6, 1.56), (7, 0.78)]
)
def test_throughput_by_split_is_figure_5a(model, num_prefill, expected):
    assert model.at(19_400, num_prefill, 8 - num_prefill).throughput_rps == pytest.approx(expected, abs=0.011)


@pytest.mark.parametrize(
    ("thousand", "expected"),
    [(5, 2.55), (10, 2.72), (15, 2.97), (18, 3.15), (19.4, 3.24), (22, 2.75), (25, 2.34), (30, 1.89), (40, 1.42)],
)
def test_throughput_by_threshold_is_figure_5b(model, thousand, expected):
    assert model.at(1000 * thousand, 3, 5).throughput_rps == pytest.approx(expected, abs=0.011)


@pytest.mark.parametrize(
    ("gbps", "rps", "threshold", "num_prefill"),
    [(10, 3.03, 26e3, 4), (8, 2.62, 29e3, 4), (5, 2.25, 42e3, 5), (2, 1.62, 65e3, 5)],
)
def test_scarce_links_raise_the_threshold(paper, gbps, rps, threshold, num_prefill):
    best = Model(plant(paper, gbps * 1e9), paper.lengths).solve()
    assert best.throughput_rps == pytest.approx(rps, rel=0.01)
    assert best.threshold_tokens == pytest.approx(threshold, rel=0.02)
    assert best.num_prefill == num_prefill
    assert best.egress_bps <= gbps * 1e9 * 1.0001


def test_baselines_are_the_papers(model):
    assert model.homogeneous(12).throughput_rps == pytest.approx(2.11, rel=0.01)
    assert (model.homogeneous(12).num_prefill, model.homogeneous(12).num_decode) == (9, 3)
    naive = model.naive()
    assert naive.throughput_rps == pytest.approx(2.45, rel=0.03)
    assert (naive.offloaded, naive.theta_own_rps) == (1.0, 0.0)


def test_mean_of_times_is_slower_than_time_of_means(paper):
    """The Jensen gap that paper.md derives: 3.18, 2.03, 2.39."""
    exact = Model(plant(paper), paper.lengths, is_exact=True)
    found = (exact.solve(), exact.homogeneous(12), exact.naive())
    assert [s.throughput_rps for s in found] == pytest.approx([3.18, 2.03, 2.39], rel=0.01)


def test_bare_prefill_times_are_the_papers(model):
    for threshold, mean_s, p90_s in ((19_400, 2.18, 3.41), (math.inf, 4.44, 9.73), (0.0, 1.67, 3.41)):
        mean, (p90,) = model.bare_ttft(threshold)
        assert (mean, p90) == pytest.approx((mean_s, p90_s), rel=0.01)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("egress_bps", [2e9, 9e9, 100e9])
def test_halving_finds_what_a_grid_finds(egress_bps, is_exact):
    lengths = Lengths.log_normal(7.0, 0.8, 64, 4000)
    own, remote = Polynomial(0.2, 1e-3, 1e-7), Polynomial(0.1, 4e-4, 3e-8)
    model = Model(Plant(remote, own, StateSize(5e7, 2e5), 2, 5, 1.5, egress_bps), lengths, is_exact=is_exact)
    grid = [
        model.at(t, n, 5 - n).throughput_rps for n in range(5) for t in (0.0, *lengths.lengths)
    ]  # fmt: skip
    assert model.solve().throughput_rps == pytest.approx(max(grid), rel=1e-9)


def test_a_useless_link_offloads_nothing():
    lengths = Lengths.of([1000, 2000, 3000])
    model = Model(Plant(Polynomial(0.1, 1e-4), Polynomial(0.1, 1e-3), StateSize(1e9, 1e6), 4, 4, 5.0, 1.0), lengths)
    best = model.solve()
    assert best.offloaded == 0.0
    assert best.bottleneck in ("own_prefill", "decode")


def test_duty_is_full_at_the_bottleneck(model):
    best = model.solve()
    assert max(best.duty.values()) == pytest.approx(1.0)
    assert best.duty["decode"] == pytest.approx(0.83, abs=0.01)


def test_lengths_split_into_parts_that_add_up():
    lengths = Lengths.of([100, 200, 200, 300, 400])
    short, long = lengths.split(200)
    assert (short.share, short.mean, long.share, long.mean) == pytest.approx((0.6, 500 / 3, 0.4, 350))
    assert lengths.split(0)[0].share == 0.0
    assert lengths.split(math.inf)[1].share == 0.0
    assert (lengths.quantile(0.5), lengths.quantile(0.95)) == (200, 400)


@pytest.mark.parametrize(
    ("lengths", "weights"), [([], []), ([1, 1], [1, 1]), ([1, 2], [1]), ([1, 2], [0, 0]), ([1, 2], [-1, 3])]
)
def test_no_distribution_is_an_error(lengths, weights):
    with pytest.raises(ValueError, match="distribution"):
        Lengths(lengths, weights)


def test_curve_goes_through_its_points_and_never_falls():
    points = [(1000, 0.44), (8000, 0.72), (32000, 1.84), (128000, 7.40)]
    curve = Curve(points)
    assert [curve(x) for x, _ in points] == pytest.approx([y for _, y in points])
    values = [curve(x) for x in range(0, 200_000, 500)]
    assert values == sorted(values)
    with pytest.raises(ValueError, match="two points"):
        Curve([(1, 2)])
