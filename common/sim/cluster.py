"""Two sites in virtual time: the daemons' own router over simulated nodes, a link and two caches.

    arrival -> views -> common.policy.routing.decide -> prefill node -> (link) -> decode node -> done

Knows nothing of how requests were made up, nor of what is reported. Called by plan.py and the benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from common.policy.capacity import Plant
from common.policy.costs import StateSize
from common.policy.profile import NodeProfile
from common.policy.routing import RouteDecision, Rules, decide
from common.policy.threshold import Signals, ThresholdController
from common.policy.views import LocalView, PeerView, RequestView
from common.sim.caches import BlockCache
from common.sim.links import Link
from common.sim.loop import Loop
from common.sim.nodes import DecodeNode, PrefillNode
from common.sim.workload import BLOCK_TOKENS, SimRequest

GOODPUT_S = 2.0
CONTROL_S = 1.0
TtftSlo = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Deployment:
    """What stands where.

    Attributes:
        remote, own: profiles of a node of either site; `own` also decodes.
        num_remote, num_prefill, num_decode: N_prfaas, N_p, N_d.
        egress_bps, rtt_s, rate_changes: the path; (instant, bits per second) pairs.
        does_local_prefill: decoding nodes compute prompts too, mixed into decode steps that then take `max_stretch`
            times as long.
        cache_tokens: room of the prefix cache of the own and of the remote site.
    """

    remote: NodeProfile
    own: NodeProfile
    state: StateSize
    num_remote: int
    num_prefill: int
    num_decode: int
    egress_bps: float = 100e9
    rtt_s: float = 0.0
    rate_changes: tuple[tuple[float, float], ...] = ()
    chunk_tokens: int = 8192
    codec_ratio: float = 1.0
    does_local_prefill: bool = False
    max_stretch: float = 3.0
    cache_tokens: tuple[float, float] = (0.0, 0.0)


class Cluster:
    """One run. `ttft_slo` gives the SLO of a request by its prompt length, for policies that look at it. `controller`
    keeps the threshold of `rules` up to date, over `plant` (with the rate that the link has then).
    """

    def __init__(
        self,
        deployment: Deployment,
        rules: Rules,
        *,
        ttft_slo: TtftSlo | None = None,
        controller: ThresholdController | None = None,
        plant: Plant | None = None,
        on_decision: Callable[[RequestView, Sequence[PeerView], LocalView, RouteDecision], None] | None = None,
    ) -> None:
        self.loop = Loop()
        self.deployment, self.rules = deployment, rules
        self._ttft_slo, self._on_decision = ttft_slo, on_decision
        self._controller, self._plant, self._stepped_at = controller, plant, 0.0
        d = deployment
        if d.own.decode is None:
            raise ValueError(f"profile {d.own.name!r} does not decode, so it cannot stand at decoded's site")
        if not d.does_local_prefill and not d.num_remote and not d.num_prefill:
            raise ValueError("there is no node that prefills")
        self.link = Link(self.loop, d.egress_bps, d.rtt_s, d.rate_changes)
        self.uplink = Link(self.loop, d.egress_bps, d.rtt_s, d.rate_changes)
        self.remote = [self._node(d.remote, f"remote{n}") for n in range(d.num_remote)]
        self.prefill = [self._node(d.own, f"own{n}") for n in range(d.num_prefill)]
        self.decode = [DecodeNode(self.loop, d.own.decode, d.own.max_rows, self._done) for _ in range(d.num_decode)]
        self.mixed = [self._mixed_node(n) for n in self.decode] if d.does_local_prefill else []
        self.caches = tuple(BlockCache(tokens, BLOCK_TOKENS) for tokens in d.cache_tokens)
        self._nodes = {node.name: node for node in (*self.remote, *self.prefill)}
        self._costs = {"remote": d.remote.cost(), "own": d.own.cost()}
        self._free_at = dict.fromkeys((*self._nodes, *(m.name for m in self.mixed)), 0.0)
        self._promised = dict.fromkeys(self._nodes, 0.0)
        self._goodput_bps, self._goodput_at, self._goodput_bytes = 0.0, 0.0, 0.0
        self.finished: list[SimRequest] = []

    def _node(self, profile: NodeProfile, name: str) -> PrefillNode:
        return PrefillNode(self.loop, name, profile.prefill, self.deployment.chunk_tokens)

    def _mixed_node(self, decode: DecodeNode) -> PrefillNode:
        """Local prefill: alone at full speed, beside rows in what a stretched step leaves."""
        node = self._node(self.deployment.own, f"local{self.decode.index(decode)}")
        stretch = self.deployment.max_stretch
        node.slowdown = lambda: stretch / (stretch - 1) if decode.num_rows else 1.0
        return node

    def run(self, requests: Sequence[SimRequest], until: float = math.inf) -> list[SimRequest]:
        """Until all are done; those that are, in order of finishing."""
        for request in requests:
            self.loop.at(request.arrived_at, self._arrive, request)
        self.loop.run(until)
        return self.finished

    # ---- routing

    def _arrive(self, request: SimRequest) -> None:
        view, peers, local = self._views(request)
        if self._controller is not None:
            self._control(self._controller, view)
        decision = decide(view, peers, local, self.rules, is_told=self._on_decision is not None)
        if self._on_decision is not None:
            self._on_decision(view, peers, local, decision)
        request.reason, request.predicted_ttft_s = decision.reason, decision.predicted_ttft_s
        request.num_held = request.num_sent_rows = view.num_held_tokens
        if view.num_uncached_tokens <= 0:
            request.place = "none"
            self._ready(request)
        elif decision.peer is None:
            self._prefill_here(request, view, decision)
        else:
            self._prefill_there(request, view, decision)

    def _control(self, controller: ThresholdController, view: RequestView) -> None:
        """Both loops of the threshold, as far as they are due."""
        controller.observe(view.num_uncached_tokens)
        now, d = self.loop.now, self.deployment
        if now - self._stepped_at < CONTROL_S:
            return
        self._stepped_at = now
        far_s, own_s = (
            max(0.0, min((self._free_at[node.name] - now for node in nodes), default=0.0))
            for nodes in (self.remote, self.prefill)
        )
        link_s = 8 * sum(self._promised.values()) / self.link.rate_bps
        signals = Signals(self._goodput_bps / self.link.rate_bps, 0.0, max(far_s, link_s), own_s)
        plant = replace(self._plant, egress_bps=self.link.rate_bps) if self._plant is not None else None
        controller.step(now, signals, plant, d.num_prefill, d.num_decode)
        self.rules = replace(self.rules, threshold_tokens=controller.threshold_tokens, exchange_tokens=controller.base)

    def _views(self, request: SimRequest) -> tuple[RequestView, list[PeerView], LocalView]:
        now, tokens = self.loop.now, request.num_prompt - 1
        here, there = (min(cache.match(request.blocks), tokens) for cache in self.caches)
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
            final_bytes=int(min(raw, state.fixed_bytes + state.bytes_per_token * last)),
            fixed_bytes=int(state.fixed_bytes),
            token_bytes=state.bytes_per_token,
            ttft_slo_s=self._ttft_slo(request.num_prompt) if self._ttft_slo is not None else None,
        )
        peers = self._remote_views(there, int(state.num_bytes(here, there))) + [
            self._own_view(node, here) for node in self.prefill
        ]
        return view, peers, self._local_view(now)

    def _remote_views(self, cached: int, push_bytes: int) -> list[PeerView]:
        d, now = self.deployment, self.loop.now
        if now - self._goodput_at >= GOODPUT_S:
            self._goodput_bps = 8 * (self.link.num_bytes - self._goodput_bytes) / (now - self._goodput_at)
            self._goodput_at, self._goodput_bytes = now, self.link.num_bytes
        return [
            PeerView(
                node.name, True, num_queued_tokens=node.num_queued_tokens,
                queued_s=max(0.0, self._free_at[node.name] - now), cost=self._costs["remote"],
                num_cached_tokens=cached, chunk_tokens=d.chunk_tokens, capacity_bps=self.link.rate_bps,
                goodput_bps=self._goodput_bps, confidence=1.0, path="wan", queued_bytes=self._promised[node.name],
                rtt_s=d.rtt_s,
                codec_ratio=d.codec_ratio, push_bytes=push_bytes,
            )
            for node in self.remote
        ]  # fmt: skip

    def _own_view(self, node: PrefillNode, cached: int) -> PeerView:
        return PeerView(
            node.name, True, num_queued_tokens=node.num_queued_tokens,
            queued_s=max(0.0, self._free_at[node.name] - self.loop.now), cost=self._costs["own"], site="own",
            num_cached_tokens=cached,
        )  # fmt: skip

    def _local_view(self, now: float) -> LocalView:
        place = min(self.decode, key=lambda node: node.load)
        if not self.mixed:
            return LocalView(can_prefill=False, num_rows=place.num_rows, step_s=place.step_s)
        here = min(self.mixed, key=lambda node: self._free_at[node.name])
        stretch = self.deployment.max_stretch
        return LocalView(
            num_queued_tokens=here.num_queued_tokens, queued_s=max(0.0, self._free_at[here.name] - now),
            cost=self._costs["own"], num_rows=place.num_rows, step_s=place.step_s,
            mixed_slowdown=stretch / (stretch - 1),
        )  # fmt: skip

    # ---- prefill

    def _prefill_here(self, request: SimRequest, view: RequestView, decision: RouteDecision) -> None:
        if not self.mixed:
            raise ValueError(f"routed to decoded itself, which does not prefill here: {decision.reason}")
        place = min(range(len(self.mixed)), key=lambda n: self._free_at[self.mixed[n].name])
        node, request.place = self.mixed[place], "local"
        slow = node.slowdown() if node.slowdown is not None else 1.0
        self._book(node, slow * self._costs["own"].seconds(view.num_cached_tokens, view.num_uncached_tokens))
        request.num_computed = view.num_uncached_tokens
        node.put(request, view.num_cached_tokens, request.num_prompt - 1, partial(self._mixed_chunk, place))

    def _mixed_chunk(self, place: int, request: SimRequest, num_tokens: int, ends_at: float, is_last: bool) -> None:
        self.decode[place].set_stretch(self.deployment.max_stretch)
        self.loop.at(ends_at, self._mixed_chunk_done, place, request, is_last)

    def _mixed_chunk_done(self, place: int, request: SimRequest, is_last: bool) -> None:
        if not self.mixed[place].num_queued_tokens:
            self.decode[place].set_stretch(1.0)
        if is_last:
            self._ready(request, self.decode[place])

    def _prefill_there(self, request: SimRequest, view: RequestView, decision: RouteDecision) -> None:
        node = self._nodes[str(decision.peer)]
        tokens = request.num_prompt - 1
        is_remote = decision.peer is not None and decision.peer.startswith("remote")
        start = view.num_cached_tokens
        if is_remote and not decision.push_tokens:
            start = min(self.caches[1].match(request.blocks), tokens)
        request.node, request.place = node.name, node.name.rstrip("0123456789")
        request.num_computed = tokens - start
        self._book(node, self._costs[request.place].seconds(start, tokens - start))
        if not is_remote:
            node.put(request, start, tokens, self._own_chunk)
            return
        self._promised[node.name] += view.raw_bytes * self.deployment.codec_ratio
        request.is_all_computed = False
        if decision.push_tokens:
            pushed = self.deployment.state.num_bytes(start, min(self.caches[1].match(request.blocks), start))
            self.uplink.send(pushed * self.deployment.codec_ratio, node.put, request, start, tokens, self._remote_chunk)
        else:
            node.put(request, start, tokens, self._remote_chunk)

    def _book(self, node: PrefillNode, seconds: float) -> None:
        """What the router believes of the node: its costs are fitted ones, the node's are the profile's."""
        now = self.loop.now
        free_at = self._free_at[node.name] if node.num_queued_tokens else now
        self._free_at[node.name] = max(now, free_at) + seconds

    def _own_chunk(self, request: SimRequest, num_tokens: int, ends_at: float, is_last: bool) -> None:
        if is_last:
            self.loop.at(ends_at, self._ready, request)

    def _remote_chunk(self, request: SimRequest, num_tokens: int, ends_at: float, is_last: bool) -> None:
        """The chunk's rows leave while it is computed, those that decoded lacks; with the last one the fixed bytes."""
        state, tokens = self.deployment.state, request.num_prompt - 1
        if is_last:
            computed = tokens
        else:
            request.num_computed -= num_tokens
            computed = tokens - request.num_computed
        rows = max(0, computed - request.num_sent_rows)
        request.num_sent_rows += rows
        raw = rows * state.bytes_per_token + (state.fixed_bytes if is_last else 0.0)
        request.num_pending += 1
        request.is_all_computed = is_last
        encoded = raw * self.deployment.codec_ratio
        self.link.send(encoded, self._chunk_sent, request, ends_at, encoded)

    def _chunk_sent(self, request: SimRequest, ends_at: float, num_bytes: float) -> None:
        self._promised[request.node] -= num_bytes
        if self.loop.now < ends_at:
            self.loop.at(ends_at, self._chunk_arrived, request)
        else:
            self._chunk_arrived(request)

    def _chunk_arrived(self, request: SimRequest) -> None:
        request.num_pending -= 1
        if request.is_all_computed and not request.num_pending:
            self.caches[1].add(request.blocks)
            self.loop.at(self.loop.now + self.deployment.rtt_s, self._ready, request)

    # ---- decode

    def _ready(self, request: SimRequest, place: DecodeNode | None = None) -> None:
        """The state is at decoded's site; `place` has it already where decoded computed it itself."""
        request.ready_at = self.loop.now
        self.caches[0].add(request.blocks)
        (place or min(self.decode, key=lambda node: node.load)).join(request)

    def _done(self, request: SimRequest) -> None:
        request.done_at = self.loop.now
        self.finished.append(request)
        for think_s, following in request.next:
            following.arrived_at = self.loop.now + think_s
            self.loop.at(following.arrived_at, self._arrive, following)

    def duty(self, seconds: float) -> dict[str, float]:
        """The part of `seconds` that each stage worked, and the link."""
        d = self.deployment
        rows = sum(node.row_s for node in self.decode)
        out = {"decode": rows / (d.num_decode * d.own.max_rows * seconds)}
        for name, nodes in (("remote_prefill", self.remote), ("own_prefill", self.prefill), ("local", self.mixed)):
            if nodes:
                out[name] = sum(node.busy_s for node in nodes) / (len(nodes) * seconds)
        return out | ({"link": self.link.busy_s / seconds} if self.remote else {})
