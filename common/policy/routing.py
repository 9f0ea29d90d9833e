"""Where a prompt is prefilled, with every term kept for `decodectl explain`.

`threshold` is the paper's rule on uncached tokens; `adaptive` compares the predicted times to first token of all
alternatives (predict.py) and what each costs others (adaptive.py); `local-only` and `remote-only` are there to
compare with. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.policy.adaptive import WEIGHTS, Weights, choose, exchange_seconds, prices
from common.policy.predict import Alternative, alternatives, can_be_pushed
from common.policy.views import LocalView, PeerView, PushMode, RequestView
from common.request import Route

Mode = Literal["threshold", "adaptive", "local-only", "remote-only"]

# Every reason of a decision, by its route; the last three of "local" are fallbacks.
FALLBACK_REASONS = ("no_peer", "peer_failed", "attempts_spent")
REASONS: dict[Route, tuple[str, ...]] = {
    "remote": ("above_threshold", "below_threshold", "remote_only", "local_only", "adaptive", "forced"),
    "local": (
        "below_threshold", "local_only", "adaptive", "forced", "nothing_to_compute", "prompt_logprobs",
        *FALLBACK_REASONS,
    ),
}  # fmt: skip
# The path counts as abundant below this utilisation (paper section 3.2 leaves the test open).
ABUNDANT = 0.5


@dataclass(frozen=True, slots=True)
class Rules:
    """How to decide. `threshold_tokens`: 0 sends everything that has something to compute, inf nothing.

    `exchange_tokens` is the threshold that was solved for the sites as they are (capacity.py); `adaptive` prices by it.
    None: nothing is solved yet, and only times count. A threshold that somebody wrote down prices nothing. `push`: of
    the prefix that decoded has and the peer lacks.
    """

    mode: Mode
    threshold_tokens: float
    max_attempts: int
    exchange_tokens: float | None = None
    weights: Weights = WEIGHTS
    push: PushMode = "auto"


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """A route and why. `is_fallback` means that remote was wanted but no peer is usable: the local fallback budget
    must allow it. `push_tokens`: the peer is to get decoded's prefix of that length first. `predicted_ttft_s` is None
    where costs are not known. `terms` are the facts the decision rests on, for people.
    """

    route: Route
    reason: str
    peer: str | None = None
    is_fallback: bool = False
    push_tokens: int = 0
    predicted_ttft_s: float | None = None
    terms: dict[str, object] = field(default_factory=dict)


def decide(
    request: RequestView, peers: Sequence[PeerView], local: LocalView, rules: Rules, *, is_told: bool = True
) -> RouteDecision:
    """Route one request. What cannot go remote is decided before any rule. `is_told` False leaves the terms out, which
    nobody reads in a simulation.
    """
    uncached = request.num_uncached_tokens
    terms = _facts(request, peers, rules) if is_told else {}
    if uncached <= 0:
        return RouteDecision("local", "nothing_to_compute", terms=terms)
    if request.wants_prompt_logprobs:
        return RouteDecision("local", "prompt_logprobs", terms=terms)
    usable = [p for p in peers if p.is_usable and p.name not in request.failed_peers]
    can_try = len(request.failed_peers) < rules.max_attempts
    chances = usable if can_try else []
    ways = alternatives(request, chances, local, rules.push)
    if is_told and ways:
        terms["alternatives"] = {way.name: way.facts() for way in ways}
    if rules.mode == "adaptive" and request.forced_route is None and chances and _is_known(chances, local):
        return _adaptive(request, ways, peers, local, rules, terms)
    wish, reason = _wish(request, usable, rules, terms if is_told else None)
    if wish == "own":
        return _own_side(request, ways, chances, rules, reason, terms)
    if not can_try:
        return RouteDecision("local", "attempts_spent", is_fallback=True, terms=terms)
    far = [p for p in usable if p.site == "remote"] or usable
    if not far:
        why = "peer_failed" if request.failed_peers else "no_peer"
        return RouteDecision("local", why, is_fallback=True, terms=terms)
    return _at_one_of(request, ways, far, rules, reason, terms)


def _facts(request: RequestView, peers: Sequence[PeerView], rules: Rules) -> dict[str, object]:
    threshold = rules.threshold_tokens
    return {
        "mode": rules.mode,
        "num_prompt_tokens": request.num_prompt_tokens,
        "uncached_tokens": request.num_uncached_tokens,
        "threshold_tokens": "inf" if math.isinf(threshold) else threshold,
        "inequality": _inequality(request.num_uncached_tokens, threshold),
        "peers": {p.name: _state(p) for p in peers},
        "failed_peers": list(request.failed_peers),
    }


def _state(peer: PeerView) -> str:
    if not peer.is_usable:
        return peer.why_not
    if peer.cost is None:
        return "usable, its speed is not known yet"
    used = f", others leave {peer.share:.0%} of its time" if peer.share < 1 else ""
    return "usable" + (", taken to be as fast as the others" if peer.is_assumed else "") + used


def _inequality(uncached: int, threshold: float) -> str:
    """The relation that holds between the two, in full digits."""
    sign = ">" if uncached > threshold else "<="
    return f"{uncached} {sign} {threshold if math.isinf(threshold) or threshold % 1 else int(threshold)}"


def _is_known(peers: Sequence[PeerView], local: LocalView) -> bool:
    """Whether every alternative can be compared: before that `adaptive` decides as `threshold` does."""
    return all(p.cost is not None for p in peers) and (local.cost is not None or not local.can_prefill)


def _adaptive(
    request: RequestView,
    ways: Sequence[Alternative],
    peers: Sequence[PeerView],
    local: LocalView,
    rules: Rules,
    terms: dict[str, object],
) -> RouteDecision:
    costs = prices(request, ways, peers, local, rules.exchange_tokens)
    exchange_s = exchange_seconds(peers, local, rules.exchange_tokens)
    way, why = choose(request, ways, costs, rules.weights, exchange_s)
    if terms:
        terms |= {"choice": why, "prices_s": {w.name: round(c, 3) for w, c in zip(ways, costs, strict=True)}}
    return _decided(way, "adaptive", terms)


def _decided(way: Alternative, reason: str, terms: dict[str, object]) -> RouteDecision:
    if terms:
        terms["predicted_ttft_s"] = round(way.ttft_s, 3)
        terms["push_tokens"] = way.push_tokens
    return RouteDecision(
        way.route, reason, way.peer, push_tokens=way.push_tokens, predicted_ttft_s=way.ttft_s, terms=terms
    )


def _wish(
    request: RequestView, usable: Sequence[PeerView], rules: Rules, terms: dict[str, object] | None
) -> tuple[Literal["own", "remote"], str]:
    """The side that the rule asks for."""
    if request.forced_route is not None:
        return "own" if request.forced_route == "local" else "remote", "forced"
    if rules.mode == "local-only":
        return "own", "local_only"
    if rules.mode == "remote-only":
        return "remote", "remote_only"
    uncached = request.num_uncached_tokens
    far = [p for p in usable if p.site == "remote"]
    if any(p.num_cached_tokens for p in far) and all(_is_abundant(p) for p in far):
        # Bandwidth is there to use the longest cache, wherever it is (paper section 3.2, abundant branch).
        longest = max(request.num_cached_tokens, *(p.num_cached_tokens for p in far))
        uncached = request.num_cached_tokens + request.num_uncached_tokens - longest
        if terms is not None:
            terms |= {"bandwidth": "abundant", "inequality": _inequality(uncached, rules.threshold_tokens)}
    return ("remote", "above_threshold") if uncached > rules.threshold_tokens else ("own", "below_threshold")


def _is_abundant(peer: PeerView) -> bool:
    return peer.capacity_bps > 0 and peer.goodput_bps < ABUNDANT * peer.capacity_bps


def _own_side(
    request: RequestView,
    ways: Sequence[Alternative],
    peers: Sequence[PeerView],
    rules: Rules,
    reason: str,
    terms: dict[str, object],
) -> RouteDecision:
    """decoded itself, or the prefill nodes that stand beside it where there are any."""
    beside = [p for p in peers if p.site == "own"] if reason != "forced" else []
    if not beside:
        ttft_s = next((way.ttft_s for way in ways if way.peer is None), None)
        return RouteDecision("local", reason, predicted_ttft_s=ttft_s, terms=terms)
    names = {p.name for p in beside}
    known = [way for way in ways if way.peer in names or way.peer is None]
    if known and all(p.cost is not None for p in beside):
        return _decided(_soonest(known), reason, terms)
    return _at_one_of(request, ways, beside, rules, reason, terms)


def _at_one_of(
    request: RequestView,
    ways: Sequence[Alternative],
    peers: Sequence[PeerView],
    rules: Rules,
    reason: str,
    terms: dict[str, object],
) -> RouteDecision:
    """The peer with the least predicted time, or the least queue where times are not known."""
    if all(p.cost is not None for p in peers):
        names = {p.name for p in peers}
        return _decided(_soonest([way for way in ways if way.peer in names]), reason, terms)
    best = min(peers, key=lambda p: (p.num_queued_tokens, p.num_streams, p.name))
    known = [way for way in ways if way.peer == best.name]
    if known:
        return _decided(_soonest(known), reason, terms)
    # What computing takes there is not known, so nothing says that a push would pay.
    pushes = rules.push == "always" and can_be_pushed(request, best, rules.push)
    push_tokens = request.num_cached_tokens if pushes else 0
    if terms:
        terms["push_tokens"] = push_tokens
    return RouteDecision("remote", reason, best.name, push_tokens=push_tokens, terms=terms)


def _soonest(ways: Sequence[Alternative]) -> Alternative:
    return min(ways, key=lambda way: (way.ttft_s, way.name))
