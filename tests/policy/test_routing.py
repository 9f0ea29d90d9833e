import math

import pytest

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
