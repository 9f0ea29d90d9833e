import math
from dataclasses import replace

import pytest

from common.policy.costs import PrefillCost
from common.policy.routing import RouteDecision, Rules, decide
from common.policy.views import LocalView, PeerView, RequestView

UP = PeerView("p1", True)
DOWN = PeerView("p2", False, "connecting")


def route(uncached: int = 2000, peers=(UP,), threshold=1000.0, mode="threshold", attempts=2, **kw) -> RouteDecision:
    view = RequestView("r", uncached + 1, uncached, **kw)
    return decide(view, peers, LocalView(), Rules(mode, threshold, attempts))


@pytest.mark.parametrize(
    ("uncached", "threshold", "expected"),
    [(1000, 1000, "local"), (1001, 1000, "remote"), (1, 0, "remote"), (10**6, math.inf, "local"), (0, 0, "local")],
)
def test_threshold_is_strict_and_plain_at_both_ends(uncached, threshold, expected):
    assert route(uncached, threshold=threshold).route == expected


def test_nothing_to_compute_stays_local_even_when_forced():
    assert route(0, forced_route="remote").reason == "nothing_to_compute"


def test_prompt_logprobs_stay_local():
    decision = route(wants_prompt_logprobs=True)
    assert (decision.route, decision.reason, decision.is_fallback) == ("local", "prompt_logprobs", False)


def test_forced_route_beats_threshold_and_mode():
    assert route(5, forced_route="remote").route == "remote"
    assert route(mode="remote-only", forced_route="local").reason == "forced"


def test_no_usable_peer_is_a_fallback():
    decision = route(peers=(DOWN,))
    assert (decision.route, decision.reason, decision.is_fallback) == ("local", "no_peer", True)
    assert decision.terms["peers"] == {"p2": "connecting"}


def test_failed_peer_is_not_asked_again():
    other = PeerView("p3", True)
    assert route(peers=(UP, other), failed_peers=("p1",)).peer == "p3"
    assert route(peers=(UP,), failed_peers=("p1",)).reason == "peer_failed"


def test_attempts_are_bounded():
    peers = [PeerView(f"p{i}", True) for i in range(5)]
    decision = route(peers=peers, failed_peers=("p0", "p1"), attempts=2)
    assert (decision.reason, decision.is_fallback) == ("attempts_spent", True)


def test_least_loaded_peer_wins():
    peers = (PeerView("a", True, num_queued_tokens=10), PeerView("b", True, num_queued_tokens=5))
    assert route(peers=peers).peer == "b"


@pytest.mark.parametrize(
    ("uncached", "threshold", "told"),
    [
        (1999, 1000.0, "1999 > 1000"),
        (1000, 1000.0, "1000 <= 1000"),
        (5, math.inf, "5 <= inf"),
        (1234567, 1234568.0, "1234567 <= 1234568"),
        (1, 0.0, "1 > 0"),
    ],
)
def test_the_inequality_told_is_true(uncached, threshold, told):
    assert route(uncached, threshold=threshold).terms["inequality"] == told


COST = PrefillCost(0.1, 1e-3)
FAST = PrefillCost(0.1, 2e-4)
FAR = PeerView("far", True, cost=FAST, capacity_bps=8e6, rtt_s=0.05)
BESIDE = PeerView("beside", True, cost=COST, site="own")
STEEP = replace(BESIDE, cost=PrefillCost(0.0, 1e-3, 1e-7))
HERE = LocalView(cost=COST, step_s=0.02)
NOWHERE = LocalView(can_prefill=False)


def adaptive(uncached, peers, local=HERE, exchange=None, slo=None, push="auto", **kw) -> RouteDecision:
    facts = {"raw_bytes": 100 * uncached, "token_bytes": 100.0, "ttft_slo_s": slo} | kw
    view = RequestView("r", uncached + 1, uncached, **facts)
    return decide(view, peers, local, Rules("adaptive", 1000.0, 2, exchange, push=push))


def test_adaptive_takes_what_is_sooner():
    assert adaptive(50, [FAR]).route == "local"
    long = adaptive(10_000, [FAR])
    assert (long.route, long.peer, long.reason) == ("remote", "far", "adaptive")
    assert long.predicted_ttft_s == pytest.approx(0.1 + 2.0 + 0.05 + 0.02)


def test_adaptive_counts_every_term():
    """Hand-computed: queue of two prompts, a path that is slower than the node, bytes ahead, half-size codec."""
    peer = replace(
        FAR, num_queued_tokens=2000, num_queued=2, capacity_bps=8e5, queued_bytes=30_000.0, codec_ratio=0.5, rtt_s=0.0
    )
    told = adaptive(1000, [peer]).terms["alternatives"]["far"]
    assert told["queue_s"] == pytest.approx(2 * 0.1 + 2000 * 2e-4)
    assert told["prefill_s"] == pytest.approx(0.3)
    assert told["link_s"] == pytest.approx(0.5)
    # Bytes may start at 0.6 s, when the queue is done, and take half a second: 0.2 s after the prompt is computed.
    assert told["transfer_s"] == pytest.approx(0.2)
    assert told["ttft_s"] == pytest.approx(0.6 + 0.3 + 0.2 + 0.02)
    late = replace(peer, queued_bytes=300_000.0)
    assert adaptive(1000, [late]).terms["alternatives"]["far"]["transfer_s"] == pytest.approx(3.0 + 0.5 - 0.9)


def test_bytes_that_come_later_are_not_ahead():
    busy = replace(FAR, name="busy", path="wan", queued_s=100.0, queued_bytes=1e6)
    idle = replace(FAR, path="wan")
    alone = adaptive(10_000, [idle]).terms["alternatives"]["far"]["ttft_s"]
    beside = adaptive(10_000, [idle, busy]).terms["alternatives"]["far"]["ttft_s"]
    assert alone <= beside < alone + 0.2


def test_adaptive_uses_what_each_side_has_cached():
    peer = replace(FAR, num_cached_tokens=9_500, capacity_bps=8e8)
    told = adaptive(1_000, [peer], num_cached_tokens=9_000, raw_bytes=100_000).terms["alternatives"]
    assert told["far"]["prefill_s"] == pytest.approx(FAST.seconds(9_500, 500), abs=1e-3)
    assert told["local"]["prefill_s"] == pytest.approx(COST.seconds(9_000, 1_000), abs=1e-3)
    behind = replace(FAR, push_bytes=900_000, capacity_bps=8e8)
    decision = adaptive(3_000, [behind], local=NOWHERE, num_cached_tokens=9_000)
    assert (decision.peer, decision.push_tokens) == ("far", 9_000)
    slow = replace(behind, capacity_bps=8e5)
    assert adaptive(3_000, [slow], local=NOWHERE, num_cached_tokens=9_000).push_tokens == 0


@pytest.mark.parametrize(
    ("push", "push_bps", "expected"),
    [("auto", 8e5, 0), ("auto", 8e8, 9_000), ("never", 8e8, 0), ("always", 8e5, 9_000), ("always", 0.0, 9_000)],
)
def test_a_prefix_is_pushed_where_that_is_quicker(push, push_bps, expected):
    """9,000 tokens are 1.8 s of its time, and 9 s or 9 ms of the path."""
    behind = replace(FAR, push_bytes=900_000, push_bps=push_bps, capacity_bps=8e9)
    told = {"num_cached_tokens": 9_000, "push": push}
    assert adaptive(3_000, [behind], NOWHERE, **told).push_tokens == expected
    assert adaptive(3_000, [replace(behind, queued_s=20.0)], NOWHERE, **told).push_tokens == (
        expected or (9_000 if push == "auto" else 0)
    ), "beside a long queue it costs nothing"


@pytest.mark.parametrize(("push", "expected"), [("auto", 0), ("never", 0), ("always", 500)])
def test_to_a_peer_whose_speed_nobody_knows_a_prefix_is_pushed_only_when_told(push, expected):
    unknown = PeerView("new", True, push_bytes=1000, push_bps=8e9)
    view = RequestView("r", 2501, 2000, num_cached_tokens=500)
    decision = decide(view, [unknown], LocalView(), Rules("threshold", 1000.0, 2, push=push))
    assert (decision.peer, decision.push_tokens, decision.terms["push_tokens"]) == ("new", expected, expected)


def test_threshold_takes_the_quicker_push_too():
    behind = replace(FAR, push_bytes=900_000, push_bps=8e8, capacity_bps=8e9)
    view = RequestView("r", 12_001, 3_000, num_cached_tokens=9_000, raw_bytes=300_000)
    assert decide(view, [behind], HERE, Rules("threshold", 1000.0, 2)).push_tokens == 9_000


def test_rows_that_run_slow_local_prefill_down():
    idle, busy = HERE, replace(HERE, num_rows=4, mixed_slowdown=3.0)
    assert adaptive(50, [FAR], local=idle).route == "local"
    assert adaptive(50, [FAR], local=busy).route == "remote"


def test_until_speeds_are_known_the_threshold_decides():
    unknown = PeerView("new", True)
    assert adaptive(1001, [unknown]).reason == "above_threshold"
    assert adaptive(1000, [unknown]).reason == "below_threshold"
    assert adaptive(1001, [FAR], local=LocalView()).reason == "above_threshold"
    assert adaptive(1001, [DOWN]).is_fallback


@pytest.mark.parametrize(
    ("uncached", "expected"), [(500, "beside"), (3_000, "beside"), (4_100, "far"), (30_000, "far")]
)
def test_prices_exchange_at_the_solved_threshold(uncached, expected):
    """Both idle, and all of them would be sooner at the far side; its node is worth keeping for long ones."""
    assert adaptive(uncached, [FAR, STEEP], NOWHERE).peer == "far"
    assert adaptive(uncached, [FAR, STEEP], NOWHERE, exchange=4_000).peer == expected


def test_a_long_queue_beats_a_price():
    queued = replace(BESIDE, queued_s=60.0)
    assert adaptive(3_000, [FAR, queued], NOWHERE, exchange=4_000).peer == "far"


def test_slo_comes_before_price():
    queued = replace(STEEP, queued_s=2.0)
    assert adaptive(2_000, [FAR, queued], NOWHERE, exchange=4_000).peer == "beside"
    assert adaptive(2_000, [FAR, queued], NOWHERE, exchange=4_000, slo=3.0).peer == "far"


def test_a_long_prompt_does_not_hold_up_a_busy_own_node():
    """12,000 tokens are 26 s of an own node, within the SLO; the far side's path is full for minutes."""
    full = replace(FAR, queued_bytes=1e9, capacity_bps=8e6)
    idle, busy = STEEP, replace(STEEP, queued_s=0.5)
    for exchange, node, expected in ((4_000, idle, "beside"), (4_000, busy, "far"), (20_000, busy, "beside")):
        decision = adaptive(12_000, [full, node], NOWHERE, exchange=exchange, slo=60.0)
        assert decision.peer == expected
    assert adaptive(12_000, [full, busy], NOWHERE, exchange=4_000, slo=60.0).terms["choice"] == "too_long"
    assert adaptive(12_000, [busy], NOWHERE, exchange=4_000, slo=60.0).peer == "beside", "there is nowhere else"


def test_who_is_late_anyway_goes_where_it_is_least_late():
    nodes = [replace(BESIDE, name=f"n{n}", queued_s=wait) for n, wait in enumerate((30.0, 12.0, 100.0))]
    assert adaptive(1_000, nodes, NOWHERE, slo=14.0).terms["choice"] == "within_slo"
    late = adaptive(1_000, nodes, NOWHERE, slo=10.0)
    assert (late.peer, late.terms["choice"]) == ("n1", "late")
    assert adaptive(1_000, nodes, NOWHERE, slo=14.0, waited_s=5.0).terms["choice"] == "late"


def test_forced_and_failed_go_before_times():
    assert adaptive(100, [FAR], forced_route="remote").peer == "far"
    assert adaptive(100_000, [FAR], forced_route="local").route == "local"
    assert adaptive(100_000, [FAR], failed_peers=("far",)).reason == "peer_failed"


def test_threshold_sends_short_ones_to_the_nodes_beside():
    peers = [FAR, BESIDE, replace(BESIDE, name="busy", queued_s=5.0)]
    assert (route(900, peers).peer, route(900, peers).reason) == ("beside", "below_threshold")
    assert (route(1100, peers).peer, route(1100, peers).reason) == ("far", "above_threshold")
    assert route(900, peers, mode="remote-only").peer == "far"
    assert route(9_000, peers, mode="local-only").peer == "beside"


@pytest.mark.parametrize(("goodput_bps", "expected"), [(1e6, "below_threshold"), (5e6, "above_threshold")])
def test_longest_cache_counts_where_bandwidth_is_abundant(goodput_bps, expected):
    """Paper section 3.2: scarce looks at decoded's cache alone, abundant at the longest."""
    peer = replace(FAR, num_cached_tokens=5_500, goodput_bps=goodput_bps)
    view = RequestView("r", 6_001, 2_000, num_cached_tokens=4_000)
    assert decide(view, [peer], LocalView(), Rules("threshold", 1000.0, 2)).reason == expected
