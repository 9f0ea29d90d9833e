"""How fast each data link may send: what its peer's path bears (path.py), within the budget of this daemon.

Every tick: each path is held or not; a budget over all peers is shared by what they use, with headroom; what a path may
use is shared among its links by what each delivers, so that a link that loses packets does not keep a share that it
cannot use. Pure; run by net/governor.py, which asks the kernel and tells it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from common.linkfacts import FIRST_LINKS, MOST_LINKS, LinkKey, LinkPlan, LinkSample, PathEstimate
from common.policy.path import Path

# A peer for whom nothing waits gets what it uses and some headroom.
HEADROOM = 1.15
# Nobody gets less than this part of an even share: it could not show that it could use more.
MIN_PART = 0.25
# Rates of links are averaged over so long, and over so many round trips: within one, a link sends in bursts.
AVERAGE_S, AVERAGE_RTTS = 0.5, 4
# What may wait at a link, in seconds of its rate, and within these bounds.
QUEUE_S, MIN_QUEUE_BYTES, MAX_QUEUE_BYTES = 0.05, 256 << 10, 4 << 20
# Send buffers: so many bandwidth-delay products; kernels size them by themselves up to about 4 MiB.
NUM_BDP, AUTOMATIC_BYTES, MAX_BUFFER_BYTES = 2.0, 3 << 20, 64 << 20
# Paths that hold more bytes, or lose a larger part of them, want more data links.
LONG_BYTES, LOSSY = 1 << 20, 2e-4
# A send buffer that was the limit for this part of the time is doubled.
BUFFER_LIMITED = 0.2
# A link on a held path begins its congestion control anew so often. BBR stops sending for 200 ms whenever ten seconds
# have shown it no shorter round trip (PROBE_RTT): 2 % of the rate, and the beginning of a burst after a rest. On a path
# whose queue is kept empty it has nothing to find out by that; it counts from its own beginning. What it may send until
# it knows the path is the pacing.
RENEW_S = 4.0


@dataclass(frozen=True, slots=True)
class EgressLimits:
    """Bounds of what this daemon sends.

    Attributes:
        max_bps: bits per second to all peers together.
        share: of each path's capacity.
    """

    max_bps: float = inf
    share: float = 1.0


@dataclass(slots=True)
class _Link:
    """What is remembered of one link from tick to tick."""

    sample: LinkSample
    rate_bps: float = 0.0  # since the last tick
    usual_bps: float = 0.0  # while there is more to send
    cap_bps: float = inf
    buffer_bytes: int = 0
    renewals: int = 0
    renewed_at: float = 0.0

    def note(self, sample: LinkSample, seconds: float) -> None:
        """How the link is now, so many seconds after it was seen before."""
        self.rate_bps = 8.0 * (sample.bytes_acked - self.sample.bytes_acked) / seconds
        if sample.has_backlog and self.sample.has_backlog:
            weight = min(1.0, seconds / max(AVERAGE_S, AVERAGE_RTTS * sample.rtt_s)) if self.usual_bps else 1.0
            self.usual_bps += weight * (self.rate_bps - self.usual_bps)


class Egress:
    """All paths of one daemon (the EgressControl protocol). `resent_bytes`: by the kernel, since the start."""

    def __init__(self, limits: EgressLimits) -> None:
        self.limits = limits
        self.resent_bytes = 0
        self._paths: dict[str, Path] = {}
        self._links: dict[LinkKey, _Link] = {}
        self._allowed: dict[str, float] = {}
        self._at = 0.0

    def estimate(self, peer: str) -> PathEstimate | None:
        """Of a peer's path; None before anything was sent to it."""
        path = self._paths.get(peer)
        return path.estimate(self._at) if path is not None else None

    def num_links(self, peer: str, congestion_control: str) -> int:
        """Data links that a peer's path needs; 0 before that is known.

        A sender that takes every loss for congestion gets a part of a lossy path in proportion to its sockets, and
        fills a long one only slowly; one that measures the path (bbr) needs no more than a few.
        """
        known = self.estimate(peer)
        if known is None or not known.goodput_bps:
            return 0
        if congestion_control.startswith("bbr"):
            return FIRST_LINKS
        is_long = max(known.goodput_bps, known.capacity_bps) / 8 * known.min_rtt_s > LONG_BYTES
        return MOST_LINKS if is_long or known.loss > LOSSY else FIRST_LINKS

    def step(self, now: float, samples: Sequence[LinkSample]) -> Mapping[LinkKey, LinkPlan]:
        """Plans for the links sampled, about every 100 ms while anything is sent. `now` is monotonic seconds."""
        by_peer: dict[str, list[LinkSample]] = {}
        for sample in samples:
            by_peer.setdefault(sample.key[0], []).append(sample)
        seconds, self._at = now - self._at, now
        buffers = self._note(samples, seconds)
        self._paths = {peer: self._paths.get(peer) or Path() for peer in by_peer}
        caps: dict[str, float] = {}
        for peer, own in by_peer.items():
            path = self._paths[peer]
            path.share = self.limits.share
            path.note(now, own, self._allowed.get(peer))
            caps[peer] = path.cap_bps if path.cap_bps is not None else inf
        caps = self._within_budget(caps, by_peer)
        self._allowed = {peer: cap for peer, cap in caps.items() if cap < inf}
        plans = {}
        for peer, own in by_peer.items():
            links = [self._links[s.key] for s in own]
            if self._paths[peer].is_short:
                _renew(links, now)
            for link, cap in zip(links, split(caps[peer], links), strict=True):
                link.cap_bps = cap
                plans[link.sample.key] = self._plan(link, buffers[link.sample.key])
        return plans

    def _note(self, samples: Sequence[LinkSample], seconds: float) -> dict[LinkKey, bool]:
        """Rates since the last tick; answers whose send buffer was the limit."""
        is_limited = {}
        for sample in samples:
            known = self._links.get(sample.key)
            if known is None or sample.bytes_acked < known.sample.bytes_acked or seconds <= 0:
                known = self._links[sample.key] = _Link(sample, renewed_at=self._at)
            else:
                self.resent_bytes += sample.bytes_retrans - known.sample.bytes_retrans
                known.note(sample, seconds)
            limited_s = sample.sndbuf_limited_s - known.sample.sndbuf_limited_s
            is_limited[sample.key] = limited_s > BUFFER_LIMITED * seconds
            known.sample = sample
        self._links = {s.key: self._links[s.key] for s in samples}
        return is_limited

    def _within_budget(self, caps: dict[str, float], by_peer: Mapping[str, Sequence[LinkSample]]) -> dict[str, float]:
        """Caps whose sum is at most the budget."""
        budget = self.limits.max_bps
        if budget == inf:
            return caps
        # A peer for whom nothing waits needs what it uses, and something to begin with.
        wanted = {}
        for peer, own in by_peer.items():
            used = sum(self._links[s.key].rate_bps for s in own)
            is_waiting = any(s.has_backlog for s in own)
            wanted[peer] = (
                caps[peer] if is_waiting else min(caps[peer], HEADROOM * used + MIN_PART * budget / len(caps))
            )
        return waterfill(budget, wanted)

    def _plan(self, link: _Link, is_buffer_limited: bool) -> LinkPlan:
        rate = max(link.usual_bps, link.cap_bps if link.cap_bps < inf else 0.0) / 8
        wanted = int(NUM_BDP * rate * link.sample.rtt_s)
        if is_buffer_limited:
            wanted = max(wanted, 2 * max(link.buffer_bytes, AUTOMATIC_BYTES))
        if wanted > max(AUTOMATIC_BYTES, link.buffer_bytes):
            link.buffer_bytes = min(wanted, MAX_BUFFER_BYTES)
        return LinkPlan(
            pacing_bps=link.cap_bps if link.cap_bps < inf else None,
            send_buffer_bytes=link.buffer_bytes or None,
            queue_bytes=int(min(max(QUEUE_S * rate, MIN_QUEUE_BYTES), MAX_QUEUE_BYTES)),
            renewals=link.renewals,
        )


def _renew(links: Sequence[_Link], now: float) -> None:
    """Of a held path without a queue."""
    for link in links:
        if now - link.renewed_at >= RENEW_S:
            link.renewals, link.renewed_at = link.renewals + 1, now


def waterfill(total: float, wanted: Mapping[str, float]) -> dict[str, float]:
    """Everybody gets what it wants, or an even part of what those leave who want less. Sums to at most `total`."""
    given: dict[str, float] = {}
    left = total
    for num_done, (name, amount) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        given[name] = min(amount, left / (len(wanted) - num_done))
        left -= given[name]
    return given


def split(cap_bps: float, links: Sequence[_Link]) -> list[float]:
    """Shares of `cap_bps`, one for each link, by what they deliver while they can."""
    if cap_bps == inf:
        return [inf] * len(links)
    known = [link.usual_bps for link in links if link.usual_bps]
    typical = sum(known) / len(known) if known else 1.0
    parts = [max(link.usual_bps or typical, MIN_PART * typical) for link in links]
    return [cap_bps * part / sum(parts) for part in parts]
