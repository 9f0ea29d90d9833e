"""What each way to prefill a request would take: the predicted time to first token, term by term, and its work.

Pure; used by routing.py, shown by `decodectl explain`. Knows nothing of which way is better: see adaptive.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.policy.views import LocalView, PeerView, PushMode, RequestView
from common.request import Route


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to prefill. All in seconds.

    Attributes:
        is_far: the state crosses from the remote site.
        queue_s, push_s, prefill_s, transfer_s, rtt_s, first_token_s: add up to `ttft_s`; `transfer_s` is what of the
            transfer is not hidden behind waiting and computing, `first_token_s` the wait for a row and one decode step.
        link_s: what the path needs for this request's bytes alone; `prefill_s` is the same for the node.
        push_tokens: decoded's prefix of so many tokens is sent to the peer first.
    """

    route: Route
    peer: str | None
    is_far: bool
    queue_s: float
    push_s: float
    prefill_s: float
    transfer_s: float
    rtt_s: float
    first_token_s: float
    link_s: float
    push_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.push_s + self.prefill_s + self.transfer_s + self.rtt_s + self.first_token_s

    @property
    def name(self) -> str:
        """For people, and to break ties."""
        return "local" if self.peer is None else f"{self.peer} (push)" if self.push_tokens else self.peer

    def facts(self) -> dict[str, Any]:
        """For `decodectl explain`: milliseconds are precise enough."""
        names = ("ttft_s", "queue_s", "prefill_s", "transfer_s", "rtt_s", "first_token_s", "link_s")
        out: dict[str, Any] = {name: round(getattr(self, name), 3) for name in names}
        if self.push_tokens:
            out |= {"push_s": round(self.push_s, 3), "push_tokens": self.push_tokens}
        return out


def alternatives(
    request: RequestView, peers: Sequence[PeerView], local: LocalView, push: PushMode = "auto"
) -> list[Alternative]:
    """All that can be predicted: those with a cost model. A peer may come twice, with and without a push ("auto")."""
    found = []
    for peer in peers:
        if peer.cost is None:
            continue
        held = min(peer.num_cached_tokens, request.num_cached_tokens + request.num_uncached_tokens)
        sharing = [p for p in peers if p.path == peer.path] if peer.path else [peer]
        can_push = can_be_pushed(request, peer, push)
        if push == "auto" or not can_push:
            found.append(_at_peer(request, peer, local, sharing, held, 0))
        if can_push:
            found.append(_at_peer(request, peer, local, sharing, request.num_cached_tokens, peer.push_bytes))
    if local.can_prefill and (here := _here(request, local)) is not None:
        found.append(here)
    return found


def can_be_pushed(request: RequestView, peer: PeerView, push: PushMode) -> bool:
    """Whether decoded may send its prefix to the peer first; with "auto" only where one can tell what that takes."""
    if not peer.push_bytes or request.num_cached_tokens <= peer.num_cached_tokens:
        return False
    return push == "always" or (push == "auto" and max(peer.push_bps, peer.capacity_bps) > 0)


def queue_s(peer: PeerView) -> float:
    """Seconds until the peer could start another prompt."""
    if peer.queued_s is not None:
        return peer.queued_s
    return peer.cost.queue_s(peer.num_queued_tokens, peer.num_queued) if peer.cost is not None else 0.0


def local_slowdown(local: LocalView) -> float:
    """How many times as long local prefill takes as alone, by the rows that run."""
    return local.mixed_slowdown if local.num_rows else 1.0


def _here(request: RequestView, local: LocalView) -> Alternative | None:
    if local.cost is None:
        return None
    slow, wait_s = local_slowdown(local), local.queued_s
    if wait_s is None:
        wait_s = slow * local.cost.queue_s(local.num_queued_tokens, local.num_queued)
    work_s = slow * local.cost.seconds(request.num_cached_tokens, request.num_uncached_tokens)
    first_s = local.step_s + max(0.0, local.row_wait_s - wait_s - work_s)
    return Alternative("local", None, False, wait_s, 0.0, work_s, 0.0, 0.0, first_s, 0.0)


def _at_peer(
    request: RequestView, peer: PeerView, local: LocalView, sharing: Sequence[PeerView], held: int, push_bytes: int
) -> Alternative:
    """`held` tokens are in the peer's cache when it starts; `sharing` use the same path."""
    uncached = request.num_cached_tokens + request.num_uncached_tokens - held
    wait_s = queue_s(peer)
    work_s = peer.cost.seconds(held, uncached) if peer.cost is not None else 0.0
    byte_s = 8.0 * peer.codec_ratio / peer.capacity_bps if peer.capacity_bps else 0.0
    push_bps = peer.push_bps or peer.capacity_bps
    # A push goes on beside the queue.
    push_s = max(0.0, 8.0 * peer.codec_ratio * push_bytes / push_bps - wait_s) if push_bps else 0.0
    starts_s = wait_s + push_s
    computed_s = starts_s + work_s
    link_s = request.raw_bytes * byte_s
    ahead_s = 8.0 * _bytes_within(computed_s, sharing) / peer.capacity_bps if peer.capacity_bps else 0.0
    # Bytes leave while they are computed; what only the last chunk gives off cannot hide behind earlier ones.
    last_s = work_s * min(1.0, peer.chunk_tokens / uncached) if peer.chunk_tokens and uncached else work_s
    late_s = computed_s - last_s + request.final_bytes * byte_s
    arrived_s = max(computed_s, max(starts_s, ahead_s) + link_s, late_s)
    transfer_s = arrived_s - computed_s + request.raw_bytes * peer.codec_s_per_byte
    first_s = local.step_s + max(0.0, local.row_wait_s - computed_s - transfer_s)
    is_far, pushed = peer.site == "remote", held if push_bytes else 0
    return Alternative(
        "remote", peer.name, is_far, wait_s, push_s, work_s, transfer_s, peer.rtt_s, first_s, link_s, pushed
    )  # fmt: skip


def _bytes_within(seconds: float, sharing: Sequence[PeerView]) -> float:
    """Bytes that come onto a path within so long: what waits behind a longer queue at its node comes later."""
    total = 0.0
    for peer in sharing:
        if peer.queued_bytes:
            busy_s = queue_s(peer)
            total += peer.queued_bytes if busy_s <= seconds else peer.queued_bytes * seconds / busy_s
    return total
