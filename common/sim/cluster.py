"""Two sites in virtual time: the daemons' own router over simulated nodes, a link and two caches.

    arrival -> views -> common.policy.routing.decide -> prefill node -> (link) -> decode node -> done

Knows nothing of how requests were made up, nor of what is reported. Called by plan.py and the benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from common.policy.capacity import Plant
from common.policy.routing import RouteDecision, Rules, decide
from common.policy.threshold import ThresholdController
from common.policy.views import LocalView, PeerView, RequestView
from common.sim.beliefs import Beliefs, TtftSlo
from common.sim.nodes import ChunkStarts, DecodeNode, PrefillNode
from common.sim.site import Deployment, Hardware
from common.sim.workload import SimRequest

# Importing state costs decoded's processor time as it arrives, in pieces of some milliseconds.
PIECE_S = 0.005


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
        self.hardware = Hardware(deployment, self._done)
        self.loop, self.link, self.uplink = self.hardware.loop, self.hardware.link, self.hardware.uplink
        self.deployment, self.rules = deployment, rules
        self.beliefs = Beliefs(self.hardware, ttft_slo)
        self._on_decision, self._controller, self._plant = on_decision, controller, plant
        self.finished: list[SimRequest] = []

    def run(self, requests: Sequence[SimRequest], until: float = math.inf) -> list[SimRequest]:
        """Until all are done; those that are, in order of finishing."""
        for request in requests:
            self.loop.at(request.arrived_at, self._arrive, request)
        self.loop.run(until)
        return self.finished

    # ---- routing

    def _arrive(self, request: SimRequest) -> None:
        view, peers, local = self.beliefs.views(request)
        if self._controller is not None:
            self.rules = self.beliefs.control(self._controller, self.rules, view, self._plant)
        decision = decide(view, peers, local, self.rules, is_told=self._on_decision is not None)
        if self._on_decision is not None:
            self._on_decision(view, peers, local, decision)
        if view.ttft_slo_s is not None:
            request.due_at = request.arrived_at + view.ttft_slo_s
        request.reason, request.predicted_ttft_s = decision.reason, decision.predicted_ttft_s
        request.num_held = request.num_sent_rows = view.num_held_tokens
        if view.num_uncached_tokens <= 0:
            request.place = "none"
            self._ready(request)
        elif decision.peer is None:
            self._prefill_here(request, view, decision)
        else:
            self._prefill_there(request, view, decision)

    # ---- prefill

    def _prefill_here(self, request: SimRequest, view: RequestView, decision: RouteDecision) -> None:
        mixed = self.hardware.mixed
        if not mixed:
            raise ValueError(f"routed to decoded itself, which does not prefill here: {decision.reason}")
        place = self.beliefs.soonest(mixed)
        node, request.place = mixed[place], "local"
        slow = self.deployment.mixed_slowdown if self.hardware.decode[place].num_rows else 1.0
        self.beliefs.book(
            node, slow * self.beliefs.costs["own"].seconds(view.num_cached_tokens, view.num_uncached_tokens)
        )
        request.num_computed = view.num_uncached_tokens
        chunk = partial(self._own_chunk, self.hardware.decode[place])
        self._put(node, request, view.num_cached_tokens, request.num_prompt - 1, chunk)

    def _put(self, node: PrefillNode, request: SimRequest, start: int, stop: int, on_chunk: ChunkStarts) -> None:
        """At decoded's own site."""
        if lead_s := self.deployment.lead_s[0]:
            self.loop.at(self.loop.now + lead_s, node.put, request, start, stop, on_chunk)
        else:
            node.put(request, start, stop, on_chunk)

    def _prefill_there(self, request: SimRequest, view: RequestView, decision: RouteDecision) -> None:
        node = self.hardware.nodes[str(decision.peer)]
        tokens = request.num_prompt - 1
        request.node, request.place = node.name, node.name.rstrip("0123456789")
        is_remote, start = request.place == "remote", view.num_cached_tokens
        there = self.hardware.remote_cache.match(request.blocks) if is_remote else 0
        if is_remote and not decision.push_tokens:
            start = min(there, tokens)
        request.num_computed = tokens - start
        self.beliefs.book(node, self.beliefs.costs[request.place].seconds(start, tokens - start))
        if not is_remote:
            self._put(node, request, start, tokens, partial(self._own_chunk, None))
            return
        request.left_bytes = view.raw_bytes * self.deployment.codec_ratio
        self.beliefs.promised[node.name] += request.left_bytes
        request.is_all_computed = False
        if decision.push_tokens:
            pushed = self.deployment.state.num_bytes(start, min(there, start))
            pushed *= self.deployment.codec_ratio
            self.uplink.send(pushed, request, node.put, start, tokens, self._remote_chunk)
        else:
            node.put(request, start, tokens, self._remote_chunk)

    def _own_chunk(
        self, place: DecodeNode | None, request: SimRequest, stop: int, ends_at: float, is_last: bool
    ) -> None:
        if is_last:
            self.loop.at(ends_at, self._ready, request, place)

    def _remote_chunk(self, request: SimRequest, stop: int, ends_at: float, is_last: bool) -> None:
        """The chunk's rows leave while it is computed, those that decoded lacks; with the last one the fixed bytes."""
        state = self.deployment.state
        rows = max(0, stop - request.num_sent_rows)
        request.num_sent_rows += rows
        raw = rows * state.bytes_per_token + (state.final_bytes(stop, request.num_held) if is_last else 0.0)
        request.num_pending += 1
        request.is_all_computed = is_last
        encoded = raw * self.deployment.codec_ratio
        num = max(1, math.ceil(self.deployment.import_s * raw / PIECE_S))
        every_s = (ends_at - self.loop.now) / num
        self.link.send(encoded / num, request, self._piece_sent, ends_at, encoded / num, num - 1, every_s)

    def _piece_sent(
        self, request: SimRequest, ends_at: float, num_bytes: float, num_left: int, every_s: float
    ) -> None:  # fmt: skip
        """One of the pieces in which a chunk's state leaves, a layer after the other, evenly while it is computed."""
        self.beliefs.promised[request.node] -= num_bytes
        self._take_in(request, self.deployment.import_s * num_bytes / self.deployment.codec_ratio)
        if num_left:
            leaves_at = ends_at - num_left * every_s
            args = num_bytes, request, self._piece_sent, ends_at, num_bytes, num_left - 1, every_s
            if self.loop.now < leaves_at:
                self.loop.at(leaves_at, self.link.send, *args)
            else:
                self.link.send(*args)
        elif self.loop.now < ends_at:
            self.loop.at(ends_at, self._chunk_arrived, request)
        else:
            self._chunk_arrived(request)

    def _take_in(self, request: SimRequest, seconds: float) -> None:
        """Costs decoded time that prompts and streams there would have had."""
        if seconds:
            place = request.number % len(self.hardware.decode)
            self.hardware.decode[place].lose(seconds)
            if self.hardware.mixed:
                self.hardware.mixed[place].lose(seconds)

    def _chunk_arrived(self, request: SimRequest) -> None:
        request.num_pending -= 1
        if request.is_all_computed and not request.num_pending:
            self.hardware.remote_cache.add(request.blocks)
            self.loop.at(self.loop.now + self.deployment.rtt_s + self.deployment.lead_s[1], self._ready, request)

    # ---- decode

    def _ready(self, request: SimRequest, place: DecodeNode | None = None) -> None:
        """The state is at decoded's site; `place` has it already where decoded computed it itself."""
        self.hardware.own_cache.add(request.blocks)
        (place or min(self.hardware.decode, key=lambda node: node.load)).join(request)

    def _done(self, request: SimRequest) -> None:
        request.done_at = self.loop.now
        self.finished.append(request)
        for think_s, following in request.next:
            following.arrived_at = self.loop.now + think_s
            self.loop.at(following.arrived_at, self._arrive, following)
