"""What the router believes of the simulated sites: the views it decides by, and the threshold it keeps up to date.

Costs are fitted curves and queues are what was booked by them, so the router may be wrong as the daemons may. Called by
cluster.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from common.policy.capacity import Model, Plant, Solution
from common.policy.lengths import Lengths
from common.policy.routing import Rules
from common.policy.threshold import Signals, ThresholdController
from common.policy.views import LocalView, PeerView, RequestView
from common.sim.nodes import PrefillNode
from common.sim.site import Hardware
from common.sim.workload import SimRequest

GOODPUT_S = 2.0
CONTROL_S = 1.0
TtftSlo = Callable[[int], float]


class Beliefs:
    """Of one run. `promised` are encoded bytes by remote node that decoded waits for."""

    def __init__(self, hardware: Hardware, ttft_slo: TtftSlo | None) -> None:
        self._hardware, self._loop, self.deployment = hardware, hardware.loop, hardware.deployment
        self._ttft_slo = ttft_slo
        self.costs = {"remote": self.deployment.remote.cost(), "own": self.deployment.own.cost()}
        self._free_at = dict.fromkeys(hardware.nodes, 0.0)
        self.promised = {node.name: 0.0 for node in hardware.remote}
        self._goodput_bps, self._goodput_at, self._goodput_bytes = 0.0, 0.0, 0.0
        self._stepped_at = 0.0

    def book(self, node: PrefillNode, seconds: float) -> None:
        """What the router believes of the node: its costs are fitted ones, the node's are the profile's."""
        now = self._loop.now
        free_at = self._free_at[node.name] if node.num_queued_tokens else now
        self._free_at[node.name] = max(now, free_at) + seconds

    def soonest(self, nodes: list[PrefillNode]) -> int:
        """The place in the list of the node that is free first."""
        return min(range(len(nodes)), key=lambda n: self._free_at[nodes[n].name])

    def control(self, controller: ThresholdController, rules: Rules, view: RequestView, plant: Plant | None) -> Rules:
        """Both loops of the threshold, as far as they are due; the rules from now on."""
        controller.observe(view.num_uncached_tokens)
        now, d = self._loop.now, self.deployment
        if now - self._stepped_at < CONTROL_S:
            return rules
        self._stepped_at = now
        far_s, own_s = (
            max(0.0, min((self._free_at[node.name] - now for node in nodes), default=0.0))
            for nodes in (self._hardware.remote, self._hardware.prefill)
        )
        link_s = 8 * sum(self.promised.values()) / self._hardware.link.rate_bps
        signals = Signals(self._goodput_bps / self._hardware.link.rate_bps, 0.0, max(far_s, link_s), own_s)

        def solve(lengths: Lengths) -> Solution | None:
            if plant is None:
                return None
            there = replace(plant, egress_bps=self._hardware.link.rate_bps)
            return Model(there, lengths, is_exact=True).best_threshold(d.num_prefill, d.num_decode)

        controller.step(now, signals, solve)
        return replace(rules, threshold_tokens=controller.threshold_tokens, exchange_tokens=controller.base)

    def views(self, request: SimRequest) -> tuple[RequestView, list[PeerView], LocalView]:
        now, tokens = self._loop.now, request.num_prompt - 1
        here, there = (
            min(cache.match(request.blocks), tokens)
            for cache in (self._hardware.own_cache, self._hardware.remote_cache)
        )
        state = self.deployment.state
        raw = state.num_bytes(tokens, here)
        last = min(tokens - there, self.deployment.chunk_tokens)
        view = RequestView(
            str(request.number),
            request.num_prompt,
            tokens - here,
            num_cached_tokens=here,
            num_held_tokens=here,
            raw_bytes=int(raw),
            final_bytes=int(min(raw, state.final_bytes(tokens, here) + state.bytes_per_token * last)),
            fixed_bytes=int(state.final_bytes(math.inf)),
            token_bytes=state.bytes_per_token,
            ttft_slo_s=self._ttft_slo(request.num_prompt) if self._ttft_slo is not None else None,
        )
        peers = self._remote_views(there, int(state.num_bytes(here, there))) + [
            self._own_view(node, here) for node in self._hardware.prefill
        ]
        return view, peers, self._local_view(now)

    def _remote_views(self, cached: int, push_bytes: int) -> list[PeerView]:
        d, now = self.deployment, self._loop.now
        if now - self._goodput_at >= GOODPUT_S:
            self._goodput_bps = 8 * (self._hardware.link.num_bytes - self._goodput_bytes) / (now - self._goodput_at)
            self._goodput_at, self._goodput_bytes = now, self._hardware.link.num_bytes
        return [
            PeerView(
                node.name, True, num_queued_tokens=node.num_queued_tokens,
                queued_s=max(0.0, self._free_at[node.name] - now), cost=self.costs["remote"],
                num_cached_tokens=cached, chunk_tokens=d.chunk_tokens, capacity_bps=self._hardware.link.rate_bps,
                goodput_bps=self._goodput_bps, confidence=1.0, path="wan", queued_bytes=self.promised[node.name],
                rtt_s=d.rtt_s,
                codec_ratio=d.codec_ratio, push_bytes=push_bytes,
            )
            for node in self._hardware.remote
        ]  # fmt: skip

    def _own_view(self, node: PrefillNode, cached: int) -> PeerView:
        return PeerView(
            node.name, True, num_queued_tokens=node.num_queued_tokens,
            queued_s=max(0.0, self._free_at[node.name] - self._loop.now), cost=self.costs["own"], site="own",
            num_cached_tokens=cached,
        )  # fmt: skip

    def _local_view(self, now: float) -> LocalView:
        place = min(self._hardware.decode, key=lambda node: node.load)
        if not self._hardware.mixed:
            return LocalView(can_prefill=False, num_rows=place.num_rows, step_s=place.step_s)
        here = self._hardware.mixed[self.soonest(self._hardware.mixed)]
        return LocalView(
            num_queued_tokens=here.num_queued_tokens, queued_s=max(0.0, self._free_at[here.name] - now),
            cost=self.costs["own"], num_rows=place.num_rows, step_s=place.step_s,
            mixed_slowdown=self.deployment.mixed_slowdown,
        )  # fmt: skip
