"""Facts about links and what is decided from them: plain frozen data between net/ (which measures) and policy/."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

MOST_TOLD = 1e15
"""Larger numbers are no count, no rate and no time that anything here could have."""
LinkKey = tuple[str, int]
"""(peer's instance id, number of the data link)."""
# Data links to a peer that is not on this machine: at first, and where the sender asks for more.
FIRST_LINKS, MOST_LINKS = 4, 8


def sane(facts: Mapping[str, float]) -> dict[str, float]:
    """What a peer told, without what cannot be: everything that is told is at least 0."""
    return {name: value for name, value in facts.items() if 0 <= value <= MOST_TOLD}


@dataclass(frozen=True, slots=True)
class LinkSample:
    """One data link at one instant: the kernel's counters since the link began, and what waits at our end.

    Attributes:
        rtt_s, min_rtt_s: smoothed and smallest round-trip time.
        bytes_acked: payload that the peer's kernel has.
        bytes_sent, bytes_retrans: given to the network, repetitions included; repetitions alone.
        sndbuf_limited_s: time in which our send buffer was the limit.
        has_backlog: there is more to send than the kernel has taken.
        busy_s: time in which anything was unsent or unacknowledged; 0 where the kernel does not tell.
        segs_sent, segs_delivered: segments given to the network, and those that have arrived, though ones before them
            may be missing; modulo 2^32, 0 where the kernel does not tell.
    """

    key: LinkKey
    rtt_s: float
    min_rtt_s: float
    bytes_acked: int
    bytes_sent: int
    bytes_retrans: int
    sndbuf_limited_s: float
    has_backlog: bool
    busy_s: float = 0.0
    segs_sent: int = 0
    segs_delivered: int = 0


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """How a link is to send.

    Attributes:
        pacing_bps: bits per second at most; None is no limit.
        send_buffer_bytes: for the kernel; None leaves it.
        queue_bytes: how much more than the kernel took may wait at this link: a link's tail is never longer than that.
        renewals: how often congestion control was to begin anew; when it grows, it is to do so now.
    """

    pacing_bps: float | None
    send_buffer_bytes: int | None
    queue_bytes: int
    renewals: int = 0


@dataclass(frozen=True, slots=True)
class PathEstimate:
    """What is known about the way to one peer, over all its data links.

    Attributes:
        goodput_bps: acknowledged payload over the last second with something to send; 0 before the first.
        capacity_bps: what the path carries when it is the limit; 0 before it was.
        confidence: 0 to 1: how much was measured, and how recently.
        queueing_s: how much longer than the shortest the round trips take now.
        loss: share of the payload sent within the last second that was sent again.
        cap_bps: what all links together are held to; None is no limit.
        age_s: seconds since the path was the limit, which is since its capacity was last seen; inf: never.
    """

    goodput_bps: float
    capacity_bps: float
    confidence: float
    rtt_s: float
    min_rtt_s: float
    queueing_s: float
    loss: float
    cap_bps: float | None
    age_s: float = 0.0


class EgressControl(Protocol):
    """Decides, every tick, how fast each link may send (policy/egress.py)."""

    def step(self, now: float, samples: Sequence[LinkSample]) -> Mapping[LinkKey, LinkPlan]:
        """Plans for the links sampled; `now` is monotonic seconds. A link that is not there is gone."""

    def estimate(self, peer: str) -> PathEstimate | None:
        """Of a peer's path; None before anything was sent to it."""

    def num_links(self, peer: str, congestion_control: str) -> int:
        """Data links that a peer's path needs; 0 before that is known."""


@dataclass(frozen=True, slots=True)
class Sending:
    """A state on its way to one client, as a SendOrder sees it. Instants are monotonic seconds.

    Attributes:
        seq_id: number of its stream, in order of arrival.
        arrived_at, due_at: when it was asked for, and until when the client would have it; inf: it did not say.
        left_s: how long the path needs for the rest; 0 where nothing is known of the path.
    """

    seq_id: int
    arrived_at: float
    due_at: float
    left_s: float


SendOrder = Callable[[Sequence[Sending], float], Sequence[Sending]]
"""(states of one client that have something to send, now) -> the same, the first to send first (sched/deadlines.py)."""


class CodecChooser(Protocol):
    """Decides, for every segment, whether the wanted codec is worth its time (policy/codec.py)."""

    def note(self, raw_bytes: int, encoded_bytes: int, seconds: float) -> None:
        """A segment was encoded by the wanted codec, in one thread."""

    def pays(self, bps: float) -> bool:
        """Whether the next segment is to be encoded, on a path of so many bits per second; 0 is not known."""
