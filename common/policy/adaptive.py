"""The choice between alternatives whose times are predicted: soon for this request, and cheap for all others.

The least predicted time alone loses to a well-tuned threshold when something is scarce: it sends state of any length
over a full path, though only long prompts are worth their bytes. So every alternative also has a price. The threshold
that equation (7) of the paper finds says what the sites' resources are worth to each other: at that length both cost
the same. That exchange rate prices every other length, cache content and path; queues decide as far as they differ.
Pure; called by routing.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.policy.predict import Alternative, local_slowdown
from common.policy.views import LocalView, PeerView, RequestView


@dataclass(frozen=True, slots=True)
class Weights:
    """Found in the simulator, see docs/policies.md.

    Attributes:
        price: how much the price of an alternative counts against this request's own seconds.
    """

    price: float = 15.0


WEIGHTS = Weights()


def choose(
    request: RequestView,
    ways: Sequence[Alternative],
    prices: Sequence[float],
    weights: Weights,
    exchange_s: float | None = None,
) -> tuple[Alternative, str]:
    """(the alternative, why): of those that keep the SLO, or of all where none does, the one with the least time plus
    price.

    `exchange_s`: what a prompt that costs the same on both sides takes at an own node. A longer one that only an own
    node with a queue could answer in time goes to the far side all the same, where it is late alone: here it would
    take the time of several that can make it.

    A late one holds up nobody: nodes put it off (sched/deadlines.py).
    """
    scores = {way.name: way.ttft_s + weights.price * price for way, price in zip(ways, prices, strict=True)}
    best = min(ways, key=lambda way: (scores[way.name], way.name))
    if request.ttft_slo_s is None:
        return best, "least"
    left_s = request.ttft_slo_s - request.waited_s
    timely = [way for way in ways if way.ttft_s <= left_s]
    if timely:
        pick = min(timely, key=lambda way: (scores[way.name], way.name))
        far = [way for way in ways if way.is_far]
        is_long = exchange_s is not None and not pick.is_far and pick.prefill_s > exchange_s
        if is_long and pick.queue_s > 0 and far:
            return min(far, key=lambda way: (scores[way.name], way.name)), "too_long"
        return pick, "within_slo"
    return best, "late"


def prices(
    request: RequestView,
    ways: Sequence[Alternative],
    peers: Sequence[PeerView],
    local: LocalView,
    exchange_tokens: float | None,
) -> list[float]:
    """Seconds of an own node that each alternative is worth; all 0 where there is nothing to exchange."""
    own_s = exchange_seconds(peers, local, exchange_tokens)
    if own_s is None or exchange_tokens is None:
        return [0.0] * len(ways)
    rates = {p.name: _rates(request, p, peers, exchange_tokens) for p in peers if p.site == "remote"}
    out = []
    for way in ways:
        if way.is_far and way.peer is not None:
            per_node, per_link = rates[way.peer]
            out.append(own_s * (way.prefill_s * per_node + way.link_s * per_link))
        else:
            out.append(way.prefill_s)
    return out


def exchange_seconds(peers: Sequence[PeerView], local: LocalView, num_tokens: float | None) -> float | None:
    """What a prompt that costs the same on both sides takes at decoded's own site; None where nothing is exchanged."""
    if num_tokens is None or not 0 < num_tokens < math.inf:
        return None
    for peer in peers:
        if peer.site == "own" and peer.cost is not None:
            return peer.cost.seconds(0, num_tokens)
    if local.can_prefill and local.cost is not None:
        return local_slowdown(local) * local.cost.seconds(0, num_tokens)
    return None


def _rates(request: RequestView, peer: PeerView, peers: Sequence[PeerView], num_tokens: float) -> tuple[float, float]:
    """(per second of node, per second of path) in units of what a prompt of `num_tokens` takes of the one that runs out
    first: what others leave of the nodes behind a path together, or the path. The other is not scarce, and so is free.
    """
    node_s = peer.cost.seconds(0, num_tokens) if peer.cost is not None else 0.0
    raw = request.fixed_bytes + request.token_bytes * num_tokens
    link_s = 8.0 * peer.codec_ratio * raw / peer.lasting_bps if peer.lasting_bps else 0.0
    num_nodes = sum(p.share for p in peers if p.path == peer.path) if peer.path else peer.share
    if link_s * num_nodes > node_s:
        return 0.0, 1.0 / link_s
    return (1.0 / node_s if node_s else 0.0), 0.0
