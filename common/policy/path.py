"""How much one peer's path carries, and what all links to it are held to so that its queues stay short.

A sender that is never held back fills the buffer before the narrowest hop: round trips double and packets are dropped.
Several sockets with BBR do that together though none does alone. So once the round trips show a queue, the sum over the
links is held just below what arrived while there was one, which is what the path carries, and now and then let up
a little to see whether it carries more (the cycle of BBR, Cardwell et al., ACM Queue 14(5), 2016, over all links at
once). A path that shows no queue is never held. Pure; used by egress.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from common.linkfacts import LinkSample, PathEstimate

# Round trips that are longer than the shortest by this part of it, and by this time, have met a queue.
QUEUE_SHARE, QUEUE_S = 0.5, 0.005
# A queue that is no longer than this part of the shortest, or `QUEUE_S`, is drained.
DRAINED_SHARE = 0.15
# Ticks in a row that must have met one.
NUM_QUEUED = 3
# What the links together are held to, in parts of the capacity.
CRUISE, PROBE, DRAIN = 0.995, 1.12, 0.9
PROBE_S, MAX_DRAIN_S, PROBE_RTTS = 0.3, 2.0, 4
# Never to less: below it there is no queue worth the control, and after an outage next to nothing was seen to arrive.
LEAST_CAP_BPS = 256e3
# A probe was carried whole if the capacity grew by this part of what it went beyond.
WHOLE = 0.6
# From one probe to the next: short while the capacity is new, which may have been measured in a bad moment and would
# hold the links down until the next probe; twice as long after each that found no more.
FIRST_CRUISE_S, CRUISE_S = 1.0, 8.0
# A capacity that nothing has confirmed for so long may have changed by much: the next burst probes this far beyond it.
STALE_S, STALE_PROBE = 10.0, 2.0
# More than the capacity by this much is a larger capacity; less than what the links may send by this much is a smaller.
LARGER, SMALLER, SMALLER_S = 1.02, 0.85, 1.0
# By the kernel's clock a link that always had something to send was busy for this part of an interval at least.
BUSY = 0.9
# Over so long is goodput measured: `RATE_S` or some round trips for decisions, `SHOWN_S` for people and for loss.
RATE_S, RATE_RTTS, SHOWN_S = 0.3, 4, 1.0
# Measurements, one a tick, of which the largest counts where a single one may be too small.
NUM_RECENT = 20
# Seconds of saturation for full confidence, and in which half of it is forgotten.
SURE_S, FORGET_S = 3.0, 120.0


class Mode(Enum):
    """What is done at the moment."""

    FREE = auto()
    DRAIN = auto()
    CRUISE = auto()
    PROBE = auto()


@dataclass(frozen=True, slots=True)
class Tick:
    """One interval: `seconds` until `at`; `is_saturated`: there always was more to send."""

    at: float
    seconds: float
    num_arrived: float
    num_sent: int
    num_retrans: int
    queueing_s: float
    is_saturated: bool


class Path:
    """One peer's path. `note` every tick, then read `cap_bps` and `estimate`.

    `share`: of the capacity that may be used; probes go beyond it, since what is never reached is never seen.
    """

    def __init__(self) -> None:
        self.mode = Mode.FREE
        self.capacity_bps, self.share = 0.0, 1.0
        self._probed_bps, self._probe = 0.0, PROBE
        self._mode_at = 0.0
        self._cruise_s = FIRST_CRUISE_S
        self._ticks: deque[Tick] = deque()
        self._last: dict[int, LinkSample] = {}
        self._last_at = 0.0
        self._num_queued = 0
        self._rtt_s = self._min_rtt_s = 0.0
        self._saturated_s, self._saturated_at = 0.0, 0.0
        self._short_since: float | None = None
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    @property
    def cap_bps(self) -> float | None:
        """Bits per second for all links together; None while the path is not held."""
        if self.mode is Mode.PROBE:
            return max(LEAST_CAP_BPS, self._probe * self.capacity_bps)
        if self.mode is Mode.FREE and (self.share == 1.0 or not self.capacity_bps):
            return None
        return max(LEAST_CAP_BPS, (DRAIN if self.mode is Mode.DRAIN else CRUISE) * self.share * self.capacity_bps)

    @property
    def is_short(self) -> bool:
        """Whether the links are held and meet no queue: by the latest round trips, or after a rest."""
        if self.cap_bps is None or not self._ticks:
            return False
        latest = self._ticks[-1]
        return latest.seconds > SHOWN_S or not self._is_queued(latest)

    def estimate(self, now: float) -> PathEstimate:
        """What is known at `now`."""
        shown = [t for t in self._ticks if t.at > now - SHOWN_S - t.seconds]
        num_sent = sum(t.num_sent for t in shown)
        sure = min(1.0, self._saturated_s / SURE_S) * 0.5 ** (max(0.0, now - self._saturated_at) / FORGET_S)
        return PathEstimate(
            goodput_bps=_rate(shown),
            capacity_bps=self.capacity_bps,
            confidence=sure if self._saturated_at else 0.0,
            rtt_s=self._rtt_s,
            min_rtt_s=self._min_rtt_s,
            queueing_s=shown[-1].queueing_s if shown else 0.0,
            loss=sum(t.num_retrans for t in shown) / num_sent if num_sent else 0.0,
            cap_bps=self.cap_bps,
            age_s=max(0.0, now - self._saturated_at) if self._saturated_at else inf,
        )

    def note(self, now: float, samples: Sequence[LinkSample], allowed_bps: float | None = None) -> None:
        """The links of this peer as they are at `now`; `allowed_bps`: what they might send together until now."""
        tick = self._tick(now, samples)
        self._last, self._last_at = {s.key[1]: s for s in samples}, now
        if tick is None:
            return
        self._ticks.append(tick)
        while self._ticks[0].at < now - 2 * max(SHOWN_S, RATE_RTTS * self._rtt_s):
            self._ticks.popleft()
        if not tick.is_saturated:
            self._num_queued, self._short_since = 0, None
            return
        is_stale = now - self._saturated_at > STALE_S
        self._saturated_s, self._saturated_at = self._saturated_s + tick.seconds, now
        if is_stale and self.mode in (Mode.CRUISE, Mode.DRAIN):
            self._recent.clear()
            self._enter(Mode.PROBE, now, STALE_PROBE)
        is_queued = self._is_queued(tick)
        self._num_queued = self._num_queued + 1 if is_queued else 0
        cap = self.cap_bps
        if is_queued or allowed_bps is None or (cap is not None and allowed_bps >= cap):
            # Nothing at all is no capacity but an outage, of which nobody knows the end.
            self._decide(now, self._goodput(now) or None, tick.queueing_s)

    def _tick(self, now: float, samples: Sequence[LinkSample]) -> Tick | None:
        seconds = now - self._last_at
        pairs = [(s, self._last[s.key[1]]) for s in samples if s.key[1] in self._last]
        if not pairs or seconds <= 0:
            return None
        self._min_rtt_s = min(s.min_rtt_s for s in samples)
        moved = [(s, before) for s, before in pairs if s.bytes_acked > before.bytes_acked] or pairs
        self._rtt_s = sum(s.rtt_s for s, _ in moved) / len(moved)
        return Tick(
            at=now,
            seconds=seconds,
            num_arrived=sum(_arrived(s, before) for s, before in pairs),
            num_sent=sum(max(0, s.bytes_sent - before.bytes_sent) for s, before in pairs),
            num_retrans=sum(max(0, s.bytes_retrans - before.bytes_retrans) for s, before in pairs),
            queueing_s=max(0.0, self._rtt_s - self._min_rtt_s),
            is_saturated=any(_is_full(s, before, seconds) for s, before in pairs),
        )

    def _is_queued(self, tick: Tick) -> bool:
        return tick.queueing_s > max(QUEUE_S, QUEUE_SHARE * self._min_rtt_s)

    def _goodput(self, now: float) -> float | None:
        """Bits per second over the latest saturated ticks; None when there are too few of them."""
        wanted = max(RATE_S, RATE_RTTS * self._min_rtt_s)
        ticks: list[Tick] = []
        for tick in reversed(self._ticks):
            if not tick.is_saturated or sum(t.seconds for t in ticks) >= wanted:
                break
            ticks.append(tick)
        return _rate(ticks) if sum(t.seconds for t in ticks) >= 0.9 * wanted else None

    def _decide(self, now: float, goodput: float | None, queueing_s: float) -> None:
        age, is_queued = now - self._mode_at, self._num_queued >= NUM_QUEUED
        if goodput is not None:
            self._recent.append(goodput)
        if goodput is not None and goodput > LARGER * self.capacity_bps:
            self.capacity_bps = goodput
        if self.mode is Mode.FREE:
            if is_queued and goodput is not None:
                self.capacity_bps = goodput
                self._enter(Mode.DRAIN, now)
        elif self.mode is Mode.DRAIN:
            if queueing_s <= max(QUEUE_S, DRAINED_SHARE * self._min_rtt_s) or age >= MAX_DRAIN_S:
                self._enter(Mode.CRUISE, now)
        elif self.mode is Mode.PROBE:
            if is_queued and self._probe == STALE_PROBE:
                # What was known is too old to weigh anything: as at the first queue of a path.
                if goodput is not None:
                    self.capacity_bps = goodput
                    self._enter(Mode.DRAIN, now)
            elif is_queued:
                self._cruise_s = min(2 * self._cruise_s, CRUISE_S)
                self._enter(Mode.DRAIN, now)
            elif age >= max(PROBE_S, PROBE_RTTS * self._min_rtt_s):
                # A larger capacity was taken over above; a probe that found one is followed by the next at once, and
                # one that was carried whole by a bolder one: after an outage little may have been taken for all.
                found = self.capacity_bps / self._probed_bps - 1.0 if self._probed_bps else 0.0
                is_whole = found > WHOLE * (self._probe - 1.0)
                bolder = min(STALE_PROBE, 2.0 * self._probe - 1.0) if is_whole else self._probe
                self._cruise_s = FIRST_CRUISE_S if found > 0 else min(2 * self._cruise_s, CRUISE_S)
                self._enter(Mode.PROBE if found > 0 else Mode.DRAIN, now, bolder if found > 0 else PROBE)
        else:
            self._cruise(now, age, goodput, is_queued=is_queued)

    def _cruise(self, now: float, age: float, goodput: float | None, *, is_queued: bool) -> None:
        is_short = goodput is not None and goodput < SMALLER * CRUISE * self.share * self.capacity_bps
        if not is_short:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        if self._short_since is not None and now - self._short_since >= SMALLER_S and goodput is not None:
            # With a queue the path carries less than it did; without one it is not the path that holds the links back.
            self.capacity_bps, self._cruise_s = goodput, FIRST_CRUISE_S
            self._enter(Mode.DRAIN if is_queued else Mode.FREE, now)
        elif is_queued:
            # The links are held to more than arrives: the most that arrived lately is the capacity.
            if self.share == 1.0:
                recent_bps = max(self._recent, default=self.capacity_bps)
                if recent_bps < self.capacity_bps:
                    self.capacity_bps, self._cruise_s = recent_bps, FIRST_CRUISE_S
            self._enter(Mode.DRAIN, now)
        elif age >= self._cruise_s:
            self._enter(Mode.PROBE, now)

    def _enter(self, mode: Mode, now: float, probe: float = PROBE) -> None:
        self._probe = probe
        self.mode, self._mode_at, self._num_queued, self._short_since = mode, now, 0, None
        self._probed_bps = self.capacity_bps


def _is_full(sample: LinkSample, before: LinkSample, seconds: float) -> bool:
    """Whether a link always had something to send: between two bursts it looks so at both ends of an interval."""
    busy_s = sample.busy_s - before.busy_s
    return sample.has_backlog and before.has_backlog and (not sample.busy_s or busy_s >= BUSY * seconds)


def _rate(ticks: Sequence[Tick]) -> float:
    seconds = sum(t.seconds for t in ticks)
    return 8.0 * sum(t.num_arrived for t in ticks) / seconds if seconds else 0.0


def _arrived(sample: LinkSample, before: LinkSample) -> float:
    """Bytes that have arrived since. Acknowledged ones alone stand still while one is missing and leap when it comes:
    after a queue that overflowed that would look like half the capacity, and then like twice as much.
    """
    sent = (sample.segs_sent - before.segs_sent) % 2**32
    if not sent or not sample.segs_delivered:
        return max(0, sample.bytes_acked - before.bytes_acked)
    delivered = (sample.segs_delivered - before.segs_delivered) % 2**32
    return delivered * max(0, sample.bytes_sent - before.bytes_sent) / sent
