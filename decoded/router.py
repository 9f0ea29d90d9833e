"""Where requests go: live objects become facts, common/policy decides over them; and the loops that keep it right.

    route      facts -> common.policy.routing.decide -> RouteDecision, written into the trace with its facts
    control    twice a second: the threshold's two loops, decoded's share of local prefill, cost models

Owned by dispatch.py, which it asks for everything live.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING

from common.policy.allocation import Allocation, allocate
from common.policy.capacity import Plant, Seconds, Solution
from common.policy.costs import PrefillCost, StateSize
from common.policy.lengths import Lengths
from common.policy.predict import Alternative, alternatives, queue_s
from common.policy.routing import RouteDecision, Rules, decide
from common.policy.threshold import Signals, ThresholdController
from common.policy.views import Demand, LocalView, PeerView, record
from common.request import Request
from common.sched.prefixes import Prefixes
from decoded.learned import Learned
from decoded.views import local_view, peer_view, prompt_view, request_view, with_speeds

if TYPE_CHECKING:
    from decoded.dispatch import Dispatcher

log = logging.getLogger(__name__)
INITIAL_THRESHOLD = 1000.0
"""Tokens, while nothing is solved."""
# The views that a forecast looks at are kept for so long: a full queue asks for each of its requests.
_FORECAST_S = 0.05
# Local prefill is held back for decoding only where so large a part of the requests that can be served comes, counted
# over so long that a burst is none.
_BUSY, _RATE_S = 0.9, 60.0
# Prompts always advance beside running streams.
_LEAST_STRETCH = 1.25


class Router:
    """Routes requests, and keeps what it routes by."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self.learned = dispatcher, Learned()
        self.controller = ThresholdController(INITIAL_THRESHOLD)
        self.allocation: Allocation | None = None
        self.arrival_rps = 0.0
        self.max_stretch = dispatcher.settings.max_stretch
        self._counted_at, self._num_counted = -inf, 0
        self._forecast_at = 0.0
        self._forecast_views: tuple[list[PeerView], LocalView] = ([], LocalView())

    @property
    def threshold_tokens(self) -> float:
        """What `threshold` mode routes by now."""
        fixed = self._dispatcher.settings.threshold_tokens
        return self.controller.threshold_tokens if fixed is None else fixed

    @property
    def rules(self) -> Rules:
        """As the configuration and the controller have them now."""
        settings = self._dispatcher.settings
        return Rules(
            settings.mode,
            self.threshold_tokens,
            settings.max_attempts,
            exchange_tokens=self.controller.exchange_tokens,
            push=settings.push,
        )

    def route(
        self,
        request: Request,
        failed_peers: tuple[str, ...] = (),
        num_held_tokens: int = 0,
        prefixes: Prefixes | None = None,
        *,
        waited_s: float = 0.0,
    ) -> RouteDecision:
        """Decide over the peers as they are now; `num_held_tokens` were cached here, or are left of failed attempts."""
        dispatcher, rules = self._dispatcher, self.rules
        asked = request_view(
            dispatcher.info, request, failed_peers, num_held_tokens,
            ttft_slo_s=request.due_s, waited_s=waited_s,
        )  # fmt: skip
        if not failed_peers:
            self.controller.observe(asked.num_uncached_tokens)
            self.learned.uncached_share.add(asked.num_uncached_tokens / max(1, request.num_prompt_tokens - 1))
        peers, local = self._peer_views(num_held_tokens, prefixes, request.num_prompt_tokens - 1), self._local_view()
        decision = decide(asked, peers, local, rules)
        if dispatcher.trace is not None:
            chosen = {name: getattr(decision, name) for name in ("route", "reason", "peer", "push_tokens")}
            facts = {"facts": record(asked, peers, local), "rules": dataclasses.asdict(rules), "decision": chosen}
            dispatcher.trace("routed", now=time.monotonic(), request_id=request.request_id, **facts)
        return decision

    def forecast_s(self, demand: Demand, num_before: int) -> float | None:
        """Seconds from being admitted to the first token, behind so many other prompt tokens; None: nobody knows.

        What is cached of its prompt is not known yet: as much as of others is taken for granted.
        """
        now = time.monotonic()
        if now - self._forecast_at > _FORECAST_S:
            self._forecast_at, self._forecast_views = now, (self._peer_views(), self._local_view())
        peers, local = self._forecast_views
        last = demand.num_prompt_tokens - 1
        num_uncached = max(1, round(last * self.learned.uncached_share.value))
        view = prompt_view(self._dispatcher.info, demand.request_id, last + 1, max(0, last - num_uncached))
        ways = self._possible(num_uncached, alternatives(view, [p for p in peers if p.is_usable], local, "never"))
        ways = [way for way in ways if isfinite(way.ttft_s)]
        if not ways:
            return None
        tokens_per_s = sum(num_uncached / max(way.prefill_s, way.link_s, 1e-9) for way in ways)
        return min(way.ttft_s for way in ways) + num_before / tokens_per_s

    def _possible(self, num_uncached: int, ways: Sequence[Alternative]) -> list[Alternative]:
        """Those that the mode lets it go."""
        mode = self._dispatcher.settings.mode
        if mode == "adaptive":
            return list(ways)
        is_far = mode == "remote-only" or (mode == "threshold" and num_uncached > self.threshold_tokens)
        return [way for way in ways if way.is_far == is_far] or [way for way in ways if way.peer is None]

    @property
    def shares(self) -> dict[str, float]:
        """The part of each usable peer's time that decoded can count on."""
        return {p.name: p.share for p in self._peer_views() if p.is_usable}

    def control(self, now: float) -> None:
        """All loops as far as they are due; called twice a second and cheap but when a solution is due."""
        backend = self._dispatcher.backend
        self.learned.decoded(backend.take_decode_steps())
        if now - self._counted_at >= _RATE_S:
            num_seen = self.controller.histogram.num_seen
            self.arrival_rps = (num_seen - self._num_counted) / (now - self._counted_at)
            self._counted_at, self._num_counted = now, num_seen
        before = self.controller.threshold_tokens
        solved = self.controller.step(now, self._signals(), self._solve)
        if solved is not None and self.allocation is not None:
            log.info(
                "threshold solved",
                extra={
                    "threshold_tokens": round(solved.threshold_tokens),
                    "before": round(before),
                    "local_share": self.allocation.local_share,
                    "can_serve_rps": round(solved.throughput_rps, 3),
                    "bottleneck": solved.bottleneck,
                    "advice": self.allocation.advice or None,
                },
            )
        if (stretch := self._stretch()) != self.max_stretch:
            self.max_stretch = stretch
            backend.set_max_stretch(stretch)

    def _signals(self) -> Signals:
        peers = [p for p in self._peer_views() if p.is_usable and p.site == "remote"]
        local = self._local_view()
        own_s = local.cost.queue_s(local.num_queued_tokens, local.num_queued) if local.cost is not None else 0.0
        waits = [_wait_s(p) for p in peers]
        return Signals(
            max((p.goodput_bps / p.capacity_bps for p in peers if p.capacity_bps), default=0.0),
            max((p.retransmitted for p in peers), default=0.0),
            min(waits, default=0.0),
            own_s,
        )

    def _solve(self, lengths: Lengths) -> Solution | None:
        """Equations (7) and (8) over what is known of both sides and left by others; None while that is not enough."""
        peers = [p for p in self._peer_views() if p.is_usable]
        own = [p.cost for p in peers if p.site == "own"]
        plant = self._plant([p for p in peers if p.site == "remote"], [*own, self._local_view().cost])
        if plant is None:
            return None
        self.allocation = allocate(plant, lengths, sum(p.share for p in peers if p.site == "own"), 1)
        return self.allocation.now

    def _plant(self, far: Sequence[PeerView], own: Sequence[PrefillCost | None]) -> Plant | None:
        costs, decode = [p.cost for p in far], self.learned.decode_cost
        output, known = self.learned.output_tokens.value, [c for c in (*costs, *own) if c is not None]
        if decode is None or not output or len(known) < len(costs) + len(own):
            return None
        rows, layout = max(1, self._dispatcher.admission.limits.max_rows), self._dispatcher.info.layout
        step_s = decode.step_s(rows, rows * self.learned.context_tokens.value)
        paths = [p.lasting_bps for p in far if p.lasting_bps]
        return Plant(
            remote_s=_mean_cost(known[: len(costs)] or known),
            own_s=_mean_cost(known[len(costs) :]),
            state=StateSize(layout.fixed_bytes, layout.token_bytes),
            num_remote=sum(p.share for p in far),
            num_own=len(own),
            decode_rps=rows / (step_s * output),
            egress_bps=sum(paths) if len(paths) == len(far) and paths else inf,
            codec_ratio=sum(p.codec_ratio for p in far) / len(far) if far else 1.0,
        )

    def _stretch(self) -> float:
        """How long a step with a local prompt may take: as the allocation has it, while decoding needs its part."""
        most, found = self._dispatcher.settings.max_stretch, self.allocation
        if found is None or self.arrival_rps < _BUSY * found.now.throughput_rps:
            return most
        return min(most, max(_LEAST_STRETCH, 1.0 / (1.0 - found.local_share)))

    def _peer_views(self, num_held: int = 0, prefixes: Prefixes | None = None, limit: int = 0) -> list[PeerView]:
        dispatcher = self._dispatcher
        settings, layout, active = dispatcher.settings, dispatcher.info.layout, list(dispatcher.active.values())
        clients = dispatcher.peers()
        widest = max((c.load.get("path_capacity_bps", 0.0) for c in clients), default=0.0)
        views: list[PeerView] = []
        for client in clients:
            num_cached = dispatcher.peer_tokens(client.name, prefixes, limit)
            views.append(
                peer_view(
                    client,
                    active,
                    self.learned,
                    site="own" if client.name in settings.own_peers else "remote",
                    num_cached_tokens=num_cached,
                    push_bytes=layout.transfer_bytes(num_cached, num_held) if num_cached < num_held else 0,
                    push_bps=widest,
                )
            )
        return with_speeds(views)

    def _local_view(self) -> LocalView:
        dispatcher = self._dispatcher
        rows = max(1, dispatcher.admission.limits.max_rows)
        active = list(dispatcher.active.values())
        return local_view(dispatcher.backend.stats(), active, self.learned, max_rows=rows, max_stretch=self.max_stretch)


def _wait_s(peer: PeerView) -> float:
    """Until a new prompt's state could be here: the node's queue, or the path's if that is longer."""
    return max(queue_s(peer), 8 * peer.queued_bytes / peer.capacity_bps if peer.capacity_bps else 0.0)


def _mean_cost(costs: Sequence[PrefillCost]) -> Seconds:
    """Of one node of several that share the work: at so many tokens the mean of their seconds."""
    return lambda tokens: sum(c.seconds(0, tokens) for c in costs) / len(costs)
