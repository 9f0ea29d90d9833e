"""What each way to prefill a request would take: predicted time to first token, term by term, and what it costs others.

Every alternative keeps somebody else waiting too: a second of work put on a node or a path delays all who come while
that is still busy. `delay_s` counts that, so that a choice is not only good for the request at hand. Pure; used by
routing.py, shown by `decodectl explain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.policy.views import LocalView, PeerView, RequestView
from common.request import Route


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to prefill. All in seconds.

    Attributes:
        ttft_s: predicted; the sum of `queue_s`, `push_s`, `prefill_s`, `transfer_s`, `rtt_s` and `first_token_s`.
        transfer_s: what of the transfer is not hidden behind waiting and computing.
        node_s, link_s: work this puts on the node and on the path.
        delay_s: what it costs those who come after, see `delay`.
        push_tokens: decoded's prefix of so many tokens is sent to the peer first.
    """

    route: Route
    peer: str | None
    queue_s: float
    push_s: float
    prefill_s: float
    transfer_s: float
    rtt_s: float
    first_token_s: float
    node_s: float
    link_s: float
    delay_s: float
    push_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.push_s + self.prefill_s + self.transfer_s + self.rtt_s + self.first_token_s

    def facts(self) -> dict[str, Any]:
        """For `decodectl explain`: milliseconds are precise enough."""
        names = ("ttft_s", "queue_s", "prefill_s", "transfer_s", "rtt_s", "first_token_s", "link_s", "delay_s")
        out: dict[str, Any] = {name: round(getattr(self, name), 3) for name in names}
        if self.push_tokens:
            out |= {"push_s": round(self.push_s, 3), "push_tokens": self.push_tokens}
        return out


@dataclass(frozen=True, slots=True)
class Pricing:
    """How much the wait of others counts. Values found in the simulator (docs/policies.md).

    Attributes:
        node, link: weight of the seconds others wait for a node, and for a path, against this request's own.
        horizon_s: a backlog of so long makes a second of work cost others a second.
    """

    node: float = 1.0
    link: float = 1.0
    horizon_s: float = 2.0


PRICING = Pricing()
NO_PRICE = Pricing(0.0, 0.0)


def delay(work_s: float, backlog_s: float, weight: float, horizon_s: float) -> float:
    """What `work_s` more on a resource cost those who come after: they are delayed by it for as long as it stays busy.

    With arrivals at the rate at which the resource serves, the number delayed is in proportion to the backlog it has
    then. Choosing the least of own time plus this is the drift-plus-penalty rule (Neely, Stochastic Network
    Optimization, 2010): it needs neither rates nor lengths of what is to come, and no queue grows that any rule could
    keep short.
    """
    return weight * work_s * (backlog_s + 0.5 * work_s) / horizon_s


def local_alternative(request: RequestView, local: LocalView, pricing: Pricing) -> Alternative | None:
    """decoded computes the prompt; None while its cost is unknown."""
    if local.cost is None:
        return None
    slow = local.mixed_slowdown if local.num_rows else 1.0
    queue_s = local.queued_s
    if queue_s is None:
        queue_s = slow * local.cost.queue_s(local.num_queued_tokens, local.num_queued)
    work_s = slow * local.cost.seconds(request.num_cached_tokens, request.num_uncached_tokens)
    price = delay(work_s, queue_s, pricing.node, pricing.horizon_s)
    after_s = local.step_s + max(0.0, local.row_wait_s - queue_s - work_s)
    return Alternative("local", None, queue_s, 0.0, work_s, 0.0, 0.0, after_s, work_s, 0.0, price)


def peer_alternatives(request: RequestView, peer: PeerView, local: LocalView, pricing: Pricing) -> list[Alternative]:
    """The peer computes what it lacks, or what decoded lacks after decoded pushed its prefix; none while unknown."""
    if peer.cost is None:
        return []
    num_tokens = request.num_uncached_tokens + request.num_cached_tokens
    held = min(peer.num_cached_tokens, num_tokens)
    found = [_at_peer(request, peer, local, pricing, held)]
    if peer.push_bytes and request.num_cached_tokens > held and peer.capacity_bps:
        found.append(_at_peer(request, peer, local, pricing, request.num_cached_tokens, peer.push_bytes))
    return found


def _at_peer(
    request: RequestView, peer: PeerView, local: LocalView, pricing: Pricing, held: int, push_bytes: int = 0
) -> Alternative:
    """`held` tokens are in the peer's cache when it starts."""
    cost = peer.cost
    if cost is None:
        raise ValueError(f"peer {peer.name} has no cost model")
    uncached = request.num_cached_tokens + request.num_uncached_tokens - held
    queue_s = cost.queue_s(peer.num_queued_tokens, peer.num_queued) if peer.queued_s is None else peer.queued_s
    work_s = cost.seconds(held, uncached)
    per_byte_s = 8.0 * peer.codec_ratio / peer.capacity_bps if peer.capacity_bps else 0.0
    # A push waits beside the queue, not after it.
    push_s = max(0.0, push_bytes * per_byte_s - queue_s)
    computed_s = queue_s + push_s + work_s
    link_s = request.raw_bytes * per_byte_s
    ahead_s = 8.0 * peer.queued_bytes / peer.capacity_bps if peer.capacity_bps else 0.0
    # Bytes leave while they are computed; what only the last chunk gives off cannot hide behind earlier ones.
    last_s = work_s * min(1.0, peer.chunk_tokens / uncached) if peer.chunk_tokens and uncached else work_s
    arrived_s = max(
        computed_s,
        max(queue_s + push_s, ahead_s) + link_s,
        computed_s - last_s + request.final_bytes * per_byte_s,
    )
    transfer_s = arrived_s - computed_s + request.raw_bytes * peer.codec_s_per_byte
    price = delay(work_s, queue_s, pricing.node, pricing.horizon_s)
    price += delay(link_s, ahead_s, pricing.link, pricing.horizon_s)
    after_s = local.step_s + max(0.0, local.row_wait_s - computed_s - transfer_s)
    push_tokens = held if push_bytes else 0
    return Alternative(
        "remote",
        peer.name,
        queue_s,
        push_s,
        work_s,
        transfer_s,
        peer.rtt_s,
        after_s,
        work_s,
        link_s,
        price,
        push_tokens,
    )
