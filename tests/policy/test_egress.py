"""Egress control against a made-up path: a bottleneck with a queue, and senders that fill whatever they may."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

import pytest

from common.linkfacts import LinkPlan, LinkSample
from common.policy.egress import MAX_QUEUE_BYTES, MIN_QUEUE_BYTES, Egress, EgressLimits, waterfill
from common.policy.path import Mode, Path

TICK_S = 0.1


@dataclass
class FluidPath:
    """`rate_bps` of a bottleneck behind a queue that drops beyond `queue_s`; links send what their plan allows.

    `most_bps`: what a link could send at most by itself (what loss leaves of it, for one).
    """

    egress: Egress
    rate_bps: float
    rtt_s: float = 0.02
    most_bps: list[float] = field(default_factory=lambda: [inf] * 4)
    peer: str = "d"
    queue_s: float = 0.1
    is_busy: bool = True
    queued_s: float = 0.0
    goodput_bps: float = 0.0
    acked: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    resent: list[float] = field(default_factory=list)
    plans: dict[int, LinkPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.acked, self.sent, self.resent = ([0.0] * len(self.most_bps) for _ in range(3))

    def move(self) -> list[LinkSample]:
        """One tick of traffic."""
        wanted = [0.0] * len(self.most_bps)
        if self.is_busy:
            for i, most in enumerate(self.most_bps):
                pacing = self.plans[i].pacing_bps if i in self.plans else None
                # A sender that nobody holds back sends more than its part of the path.
                wanted[i] = min(most, pacing if pacing is not None else 1.5 * self.rate_bps / len(self.most_bps))
        offered = sum(wanted)
        self.queued_s = max(0.0, self.queued_s + TICK_S * (offered / self.rate_bps - 1))
        dropped = max(0.0, self.queued_s - self.queue_s)
        self.queued_s -= dropped
        arrived = self.rate_bps if self.queued_s > 0 else min(offered, self.rate_bps)
        self.goodput_bps = arrived
        for i, rate in enumerate(wanted):
            part = rate / offered if offered else 0.0
            self.acked[i] += part * arrived * TICK_S / 8
            self.sent[i] += (part * arrived * TICK_S + part * dropped * self.rate_bps) / 8
            self.resent[i] += part * dropped * self.rate_bps / 8
        return [
            LinkSample(
                key=(self.peer, i),
                rtt_s=self.rtt_s + self.queued_s,
                min_rtt_s=self.rtt_s,
                bytes_acked=int(self.acked[i]),
                bytes_sent=int(self.sent[i]),
                bytes_retrans=int(self.resent[i]),
                sndbuf_limited_s=0.0,
                has_backlog=self.is_busy,
            )
            for i in range(len(wanted))
        ]


class World:
    """Paths of one daemon in virtual time."""

    def __init__(self, *rates_bps: float, limits: EgressLimits | None = None, **each) -> None:
        self.egress, self.now = Egress(limits or EgressLimits()), 100.0
        self.paths = [FluidPath(self.egress, rate, peer=f"d{n}", **each) for n, rate in enumerate(rates_bps)]

    def run(self, seconds: float) -> list[float]:
        """Goodput of all paths together at each tick."""
        seen = []
        for _ in range(round(seconds / TICK_S)):
            samples = [s for path in self.paths for s in path.move()]
            self.now += TICK_S
            for (peer, link), plan in self.egress.step(self.now, samples).items():
                self.paths[int(peer[1:])].plans[link] = plan
            seen.append(sum(path.goodput_bps for path in self.paths))
        return seen


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_a_saturated_path_is_held_just_below_what_it_carries() -> None:
    world = World(250e6)
    world.run(2)
    [path] = world.paths
    sent, resent = sum(path.sent), sum(path.resent)
    goodput = world.run(20)
    assert mean(goodput) > 0.95 * 250e6
    assert sum(path.resent) - resent < 0.01 * (sum(path.sent) - sent)
    known = world.egress.estimate("d0")
    assert known is not None
    assert known.capacity_bps == pytest.approx(250e6, rel=0.03)
    assert known.confidence == 1.0
    assert known.cap_bps is not None
    assert known.queueing_s < 0.5 * path.rtt_s


def test_queues_stay_short() -> None:
    world = World(100e6, rtt_s=0.08, queue_s=0.3)
    world.run(3)
    queues = []
    for _ in range(200):
        world.run(TICK_S)
        queues.append(world.paths[0].queued_s)
    assert mean(queues) < 0.15 * 0.08
    assert max(queues) < 0.08


def test_a_path_without_a_queue_is_not_held() -> None:
    world = World(1e9, most_bps=[60e6] * 4)  # loss, not the path, is what holds these links back
    world.run(10)
    assert all(plan.pacing_bps is None for plan in world.paths[0].plans.values())
    known = world.egress.estimate("d0")
    assert known is not None
    assert known.goodput_bps == pytest.approx(240e6, rel=0.02)
    assert known.cap_bps is None


def test_a_missing_packet_makes_no_path_look_narrow_and_then_wide() -> None:
    path, per_tick = Path(), 800 * 1448
    acked = sent = 0
    for tick in range(30):
        sent += 800
        # In tick 10 one packet is lost: what comes after it is there, and counted when it has come.
        acked = acked if tick == 10 else sent * 1448
        path.note(
            100.0 + TICK_S * tick,
            [
                LinkSample(
                    key=("d", 1), rtt_s=0.05, min_rtt_s=0.02, bytes_acked=acked, bytes_sent=sent * 1448,
                    bytes_retrans=0, sndbuf_limited_s=0.0, has_backlog=True, segs_sent=sent, segs_delivered=sent,
                )
            ],
        )  # fmt: skip
    assert path.capacity_bps == pytest.approx(8 * per_tick / TICK_S, rel=0.01)


def test_links_of_a_held_path_begin_congestion_control_anew_in_time() -> None:
    world = World(100e6)
    world.run(60)
    for plan in world.paths[0].plans.values():
        assert 10 <= plan.renewals <= 15  # more often than the 10 s after which bbr would stop to look


def test_after_a_rest_congestion_control_begins_anew_with_the_first_bytes() -> None:
    world = World(100e6)
    world.run(10)
    [path] = world.paths
    before = [plan.renewals for plan in path.plans.values()]
    world.now += 30
    path.queued_s = 0.04  # the smoothed round trip is still that of the last packets before the rest
    world.run(TICK_S)
    assert [plan.renewals for plan in path.plans.values()] == [n + 1 for n in before]


@pytest.mark.parametrize("world", [World(1e9, most_bps=[60e6] * 4), World(1e9, limits=EgressLimits(max_bps=100e6))])
def test_links_of_a_path_whose_capacity_is_not_known_are_left_alone(world: World) -> None:
    world.run(60)
    assert all(plan.renewals == 0 for plan in world.paths[0].plans.values())


@pytest.mark.parametrize(("before", "after"), [(250e6, 100e6), (100e6, 250e6)])
def test_a_path_that_changes_is_followed(before: float, after: float) -> None:
    world = World(before)
    world.run(15)
    world.paths[0].rate_bps = after
    world.run(15)
    assert mean(world.run(10)) > 0.93 * after
    assert world.paths[0].queued_s < 0.05


@pytest.mark.parametrize("low", [0.3, 0.6, 0.9])
def test_a_bad_moment_holds_nobody_down_for_long(low: float) -> None:
    """What was measured while a path carried less for a few seconds is looked at again soon."""
    world = World(250e6)
    world.run(5)
    world.paths[0].rate_bps = low * 250e6
    world.run(4)
    world.paths[0].rate_bps = 250e6
    world.run(3)
    assert mean(world.run(4)) > 0.97 * 250e6


def test_a_link_that_loses_packets_does_not_keep_its_share() -> None:
    world = World(200e6, most_bps=[5e6, inf, inf, inf])
    world.run(12)
    assert mean(world.run(10)) > 0.92 * 200e6
    pacing = [world.paths[0].plans[i].pacing_bps for i in range(4)]
    assert all(p is not None for p in pacing)
    assert pacing[0] < 0.5 * min(pacing[1:])


def test_what_is_known_holds_from_the_first_tick_of_the_next_burst() -> None:
    world = World(250e6)
    world.run(6)
    [path] = world.paths
    path.is_busy = False
    world.run(5)
    resent = sum(path.resent)
    path.is_busy = True
    assert mean(world.run(1)[1:]) > 0.9 * 250e6
    assert sum(path.resent) == resent
    assert max(p.pacing_bps or inf for p in path.plans.values()) < 0.5 * 250e6


@pytest.mark.parametrize(("before", "after"), [(25e6, 250e6), (250e6, 250e6), (250e6, 50e6)])
def test_a_capacity_that_is_old_is_looked_at_again_in_the_first_second(before: float, after: float) -> None:
    world = World(before)
    world.run(6)
    [path] = world.paths
    path.is_busy = False
    world.run(20)
    path.is_busy, path.rate_bps = True, after
    world.run(2)
    known = world.egress.estimate("d0")
    assert known is not None
    assert known.capacity_bps == pytest.approx(after, rel=0.15)
    world.run(1)
    assert path.queued_s < 0.05


def test_confidence_fades_while_nothing_is_sent() -> None:
    world = World(250e6)
    assert world.egress.estimate("d0") is None
    world.run(1)
    early = world.egress.estimate("d0")
    world.run(5)
    sure = world.egress.estimate("d0")
    world.paths[0].is_busy = False
    world.run(120)
    later = world.egress.estimate("d0")
    assert early is not None
    assert sure is not None
    assert later is not None
    assert 0 < early.confidence < sure.confidence == 1.0
    assert later.confidence == pytest.approx(0.5, abs=0.01)
    assert later.goodput_bps == 0.0


def test_the_budget_holds_over_all_peers_and_goes_to_those_who_use_it() -> None:
    world = World(500e6, 500e6, limits=EgressLimits(max_bps=200e6))
    world.run(3)
    assert mean(world.run(5)) == pytest.approx(200e6, rel=0.03)
    first, second = world.paths
    assert first.goodput_bps == pytest.approx(second.goodput_bps, rel=0.1)
    second.is_busy = False
    world.run(2)
    assert first.goodput_bps > 0.7 * 200e6
    assert mean(world.run(3)) <= 1.01 * 200e6
    second.is_busy = True
    world.run(2)
    assert mean(world.run(3)) <= 1.03 * 200e6
    assert second.goodput_bps > 0.4 * 200e6


def test_a_share_of_the_path_leaves_the_rest_to_others() -> None:
    world = World(100e6, limits=EgressLimits(share=0.5))
    world.run(3)
    assert mean(world.run(10)) < 0.55 * 100e6
    assert mean(world.run(10)) > 0.4 * 100e6


def test_limits_change_while_running() -> None:
    world = World(100e6)
    world.run(5)
    world.egress.limits = EgressLimits(max_bps=20e6)
    world.run(1)
    assert mean(world.run(3)) == pytest.approx(20e6, rel=0.03)
    world.egress.limits = EgressLimits()
    world.run(25)
    assert mean(world.run(5)) > 0.9 * 100e6


def test_buffers_and_queues_follow_the_rate() -> None:
    fast, slow = World(2e9, rtt_s=0.08), World(20e6, rtt_s=0.02)
    fast.run(5)
    slow.run(5)
    plans = fast.paths[0].plans.values()
    assert all(plan.send_buffer_bytes is not None for plan in plans)
    assert sum(plan.send_buffer_bytes or 0 for plan in plans) > 2 * 2e9 / 8 * 0.08 * 0.8
    assert all(MIN_QUEUE_BYTES < plan.queue_bytes <= MAX_QUEUE_BYTES for plan in plans)
    assert all(plan.send_buffer_bytes is None for plan in slow.paths[0].plans.values())
    assert all(plan.queue_bytes == MIN_QUEUE_BYTES for plan in slow.paths[0].plans.values())


@pytest.mark.parametrize(
    ("congestion_control", "rate_bps", "rtt_s", "queue_s", "expected"),
    [
        ("bbr", 1e9, 0.08, 0.1, 4),
        ("cubic", 50e6, 0.01, 1.0, 4),
        ("cubic", 1e9, 0.08, 0.1, 8),
        ("", 20e6, 0.01, 0.01, 8),
    ],
)
def test_how_many_links_a_path_needs(congestion_control, rate_bps, rtt_s, queue_s, expected) -> None:
    world = World(rate_bps, rtt_s=rtt_s, queue_s=queue_s)
    assert world.egress.num_links("d0", congestion_control) == 0
    world.run(0.5)  # the last path drops packets by then
    assert world.egress.num_links("d0", congestion_control) == expected


def sample(acked: int, *, link: int = 1, limited_s: float = 0.0) -> LinkSample:
    return LinkSample(("d0", link), 0.02, 0.02, acked, acked, 0, limited_s, True)


def test_a_send_buffer_that_is_the_limit_grows() -> None:
    egress, sizes = Egress(EgressLimits()), []
    for n in range(5):
        plan = egress.step(n * TICK_S, [sample(n * 1000, limited_s=n * 0.05)])["d0", 1]
        sizes.append(plan.send_buffer_bytes or 0)
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[1] > 0


def test_a_link_that_began_again_is_another() -> None:
    egress = Egress(EgressLimits())
    for n, acked in enumerate((0, 10_000_000, 20_000_000, 1000, 2000)):
        egress.step(n * TICK_S, [sample(acked)])
        known = egress.estimate("d0")
        assert known is not None
        assert known.goodput_bps >= 0
    assert egress.resent_bytes == 0
    assert egress.step(9.0, []) == {}
    assert egress.estimate("d0") is None


def test_waterfill() -> None:
    assert waterfill(100, {"a": 10, "b": inf, "c": inf}) == {"a": 10, "b": 45, "c": 45}
    assert waterfill(100, {"a": 10, "b": 20}) == {"a": 10, "b": 20}
    assert waterfill(0, {"a": 10}) == {"a": 0}
    assert waterfill(10, {}) == {}


def test_a_free_path_is_never_drained() -> None:
    world = World(1e9, most_bps=[10e6] * 4)
    world.run(30)
    assert world.egress._paths["d0"].mode is Mode.FREE


@pytest.mark.parametrize("busy_s", [0.05, 0.1])
def test_bursts_with_gaps_do_not_make_a_path_look_small(busy_s: float) -> None:
    """Half of each interval there is nothing to send, though there is at either end of it; then all of it."""
    egress, rate, queued_s = Egress(EgressLimits()), 50e6, 0.015
    plans: dict = {}
    for tick in range(1, 40):
        acked = int(tick * busy_s * rate / 8)
        sample = LinkSample(("d", 0), 0.02 + queued_s, 0.02, acked, acked, 0, 0.0, True, busy_s=tick * busy_s)
        plans |= egress.step(100 + tick * TICK_S, [sample])
    known = egress.estimate("d")
    assert known is not None
    if busy_s < TICK_S:
        assert known.capacity_bps == 0.0 and known.cap_bps is None
    else:
        assert known.capacity_bps == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("outage_s", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("at_s", [2.0, 6.3, 11.9, 17.4])
def test_an_outage_is_no_capacity(at_s: float, outage_s: float) -> None:
    """Nothing arrives and the kernel's round trips stand still where they were, above a queue or not."""
    world = World(100e6)
    world.run(at_s)
    [path] = world.paths
    samples = path.move()
    for stale in (samples, [replace(s, rtt_s=path.rtt_s + 0.05) for s in samples]):
        for _ in range(round(outage_s / TICK_S)):
            world.now += TICK_S
            plans = world.egress.step(world.now, stale)
            assert all((plan.pacing_bps or inf) > 50e3 for plan in plans.values()), "never to nothing"
        known = world.egress.estimate("d0")
        assert known is not None and known.capacity_bps > 50e6
    assert mean(world.run(5)) > 0.9 * 100e6


@pytest.mark.parametrize("rate_bps", [0.7e6, 5e6, 30e6])
@pytest.mark.parametrize("seconds", [3, 15])
def test_what_little_was_taken_for_all_is_left_behind_soon(rate_bps: float, seconds: int) -> None:
    world = World(100e6)
    world.run(10)
    [path] = world.paths
    path.rate_bps = rate_bps
    world.run(seconds)
    path.rate_bps = 100e6
    world.run(9)
    assert mean(world.run(3)) > 0.9 * 100e6
