"""The threshold controller and the allocation: solved from what was seen, raised at once, lowered late."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from common.policy.allocation import allocate
from common.policy.capacity import Model, Plant
from common.policy.costs import StateSize
from common.policy.lengths import Lengths
from common.policy.profile import Polynomial
from common.policy.threshold import LengthHistogram, Signals, ThresholdController
from common.sim.plan import plant
from common.sim.scenario import PAPER, scenario

QUIET, FULL = Signals(), Signals(utilisation=0.97, queue_s=5.0)


@pytest.fixture(scope="module")
def paper():
    return scenario(PAPER)


def papers_threshold(paper):
    return lambda lengths: Model(plant(paper), lengths, is_exact=True).best_threshold(3, 5)


def test_slow_loop_finds_the_papers_threshold_from_requests(paper):
    controller = ThresholdController(1000.0)
    for shape in paper.shapes:
        controller.observe(shape.num_prompt)
    assert controller.threshold_tokens == 1000.0
    solved = controller.step(0.0, QUIET, papers_threshold(paper))
    assert solved is not None
    assert controller.threshold_tokens == pytest.approx(19_500, rel=0.05)
    assert controller.step(30.0, QUIET, papers_threshold(paper)) is None  # not due
    assert controller.step(61.0, QUIET, papers_threshold(paper)) is not None


def test_slow_loop_follows_a_mix_that_shifts(paper):
    rng = random.Random(1)
    controller = ThresholdController(1000.0)
    for now, mean in ((0.0, 30_000), (100.0, 6_000)):
        for _ in range(8000):
            controller.observe(int(rng.expovariate(1 / mean)) + 1)
        controller.step(now, QUIET, papers_threshold(paper))
        if now == 0.0:
            before = controller.threshold_tokens
    assert controller.threshold_tokens < 0.4 * before


def test_too_few_requests_change_nothing(paper):
    controller = ThresholdController(1000.0)
    controller.observe(50_000)
    assert controller.step(0.0, QUIET, papers_threshold(paper)) is None
    assert controller.threshold_tokens == 1000.0


@pytest.mark.parametrize("signal", [FULL, Signals(retransmitted=0.1, queue_s=3.0), Signals(queue_s=20.0)])
def test_fast_loop_raises_at_once_and_lowers_late(signal):
    controller = ThresholdController(1000.0)
    controller.step(0.0, signal)
    assert controller.threshold_tokens == 1250.0
    controller.step(1.0, signal)
    assert controller.threshold_tokens == 1250.0
    controller.step(2.0, signal)
    raised = controller.threshold_tokens
    assert raised > 1500.0
    for now in (4.0, 8.0, 11.0):
        controller.step(now, QUIET)
        assert controller.threshold_tokens == raised
    values = []
    for now in range(12, 60, 2):
        controller.step(float(now), QUIET)
        values.append(controller.threshold_tokens)
    assert values == sorted(values, reverse=True)
    assert values[-1] == 1000.0


def test_between_the_marks_it_stays():
    controller = ThresholdController(1000.0)
    controller.step(0.0, FULL)
    for now in range(10, 100, 10):
        controller.step(float(now), Signals(utilisation=0.9))
    assert controller.threshold_tokens == 1250.0


def test_a_full_path_is_no_reason_while_the_own_side_is_as_busy():
    controller = ThresholdController(1000.0)
    for now in range(0, 20, 2):
        controller.step(float(now), Signals(utilisation=1.0, queue_s=9.0, own_queue_s=8.0))
    assert controller.threshold_tokens == 1000.0
    controller.step(20.0, FULL)
    controller.step(22.0, Signals(utilisation=1.0, queue_s=5.0, own_queue_s=9.0))
    assert controller.threshold_tokens == 1000.0


def test_it_is_bounded():
    controller = ThresholdController(1000.0)
    for now in range(0, 1000, 2):
        controller.step(float(now), FULL)
    assert controller.threshold_tokens == 8000.0


def test_histogram_forgets_and_does_not_overflow():
    histogram = LengthHistogram(half_life=50)
    for _ in range(30_000):
        histogram.add(100_000)
    for _ in range(500):
        histogram.add(100)
    assert histogram.lengths().mean == pytest.approx(100, rel=1.1)
    histogram.add(0)
    assert histogram.num_seen == 30_500


def test_allocation_says_what_the_solver_says(paper):
    lengths = paper.lengths
    right = allocate(plant(paper), lengths, 3, 5)
    assert (right.best.num_prefill, right.best.num_decode, right.advice) == (3, 5, "")
    wrong = allocate(plant(paper), lengths, 1, 7)
    assert wrong.local_share > 0.2  # decoded helps out
    assert wrong.now.throughput_rps > 1.15 * Model(plant(paper), lengths).best_threshold(1, 7).throughput_rps
    idle = allocate(plant(paper), lengths, 6, 2)
    assert idle.local_share == 0.0
    assert "3 prefill and 5 decode nodes" in idle.advice
    assert "decode is the bottleneck" in idle.advice


def test_lone_decoded_gives_what_decode_can_spare():
    lengths = Lengths.of([500, 1000, 4000])
    small = Plant(Polynomial(0.0, 1e-4), Polynomial(0.0, 1e-3), StateSize(0, 1e5), 1, 1, 4.0, 1e9)
    told = allocate(small, lengths, 0, 1)
    assert 0.0 < told.local_share < 0.9
    assert told.now.throughput_rps == max(
        Model(small, lengths, is_exact=True).best_threshold(0.05 * n, 1 - 0.05 * n).throughput_rps for n in range(19)
    )
    with pytest.raises(ValueError, match="without a decoded"):
        allocate(small, lengths, 1, 0)


def test_what_others_use_of_the_remote_site_raises_the_threshold_and_pays(paper):
    """Of four remote nodes two are left: who solves for four is told more than there is, and sends too much there."""
    lengths = paper.lengths
    alone = plant(paper)
    shared = replace(alone, num_remote=2.0)
    believed = Model(alone, lengths, is_exact=True).best_threshold(3, 5)
    right = Model(shared, lengths, is_exact=True).best_threshold(3, 5)
    really = Model(shared, lengths, is_exact=True).at(believed.threshold_tokens, 3, 5)
    assert right.threshold_tokens > 1.3 * believed.threshold_tokens
    assert believed.throughput_rps > 1.9 * really.throughput_rps
    assert right.throughput_rps > 1.2 * really.throughput_rps


def test_shared_own_nodes_count_by_what_is_left_and_nobody_is_told_to_change_their_roles(paper):
    lengths = paper.lengths
    whole, part = allocate(plant(paper), lengths, 6, 2), allocate(plant(paper), lengths, 5.5, 2)
    assert "3 prefill and 5 decode" in whole.advice and part.advice == ""
    assert part.best == part.now
    assert part.now.num_prefill == 5.5
    less = allocate(plant(paper), lengths, 0.5, 2).now
    assert less.throughput_rps < allocate(plant(paper), lengths, 1, 2).now.throughput_rps + 1e-9
