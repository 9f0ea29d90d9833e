"""The life of a request in decoded: admit, route, prefill (here or at a peer), stream tokens, one counted outcome.

Decisions come from common/policy; this module only carries them out. The API sees Dispatcher.submit and ActiveRequest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.backend import Backend, BackendStats
from common.daemon import version_facts
from common.errors import Draining, InvalidRequest, Overloaded
from common.layout import ModelInfo
from common.net.pool import PeerClient
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.fallback import FallbackBudget
from common.request import Request, RequestReport
from common.sched.hot_prefixes import HotPrefixes
from common.sched.prefixes import Prefixes
from common.trace import TraceWriter
from decoded.active import ActiveRequest
from decoded.demands import classify, demand_of
from decoded.directory import Directory
from decoded.metrics import DecodeMetrics
from decoded.router import Router
from decoded.settings import DispatchSettings

log = logging.getLogger(__name__)
_KEPT_RECORDS = 1000
JOIN_WAIT_S = 1.0
"""What a request that may not be computed here waits for a peer that is just being connected to, as after a reload."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What is kept of a finished request for `decodectl explain`: no tokens, or 1,000 long prompts would stay."""

    decisions: list[dict[str, Any]]
    report: RequestReport
    num_output_tokens: int
    stage: str = "finished"


class Dispatcher:
    """Owns admission, routing and the records of all requests."""

    def __init__(
        self,
        backend: Backend,
        peers: Callable[[], Sequence[PeerClient]],
        *,
        admission: AdmissionController,
        fallback: FallbackBudget,
        settings: DispatchSettings,
        metrics: DecodeMetrics,
        peer_warning: str = "",
        peers_changed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`peer_warning` goes into the report of every request that a peer prefills. `peers_changed` returns when the
        state of any peer changes; without it no request waits for one.
        """
        self.backend, self.peers, self._peers_changed = backend, peers, peers_changed
        self.admission, self.fallback = admission, fallback
        self.settings, self.metrics = settings, metrics
        self.peer_warning = peer_warning
        self.trace: TraceWriter | None = None
        self.directory: Directory | None = None
        """What peers hold of prefixes."""
        self.hot = HotPrefixes()
        self.is_draining = self.is_stopping = False
        self.active: dict[str, ActiveRequest] = {}
        self.records: OrderedDict[str, RequestRecord] = OrderedDict()
        self.last_output_at = 0.0
        self._counted = BackendStats()
        self._idle = asyncio.Event()
        self._idle.set()
        self.router = Router(self)
        admission.forecast = self.router.forecast_s
        metrics.running.set_function(lambda: len(admission.running))
        metrics.watch_queue(self._queue_lengths)
        self.set_limits(admission.limits)
        metrics.queued_tokens.set_function(lambda: admission.num_queued_tokens)
        metrics.watch_router(self.router)
        metrics.max_state_bytes.set_function(lambda: admission.limits.max_state_bytes)
        metrics.reserved_bytes.set_function(lambda: admission.state_bytes)

    @property
    def info(self) -> ModelInfo:
        """The served model."""
        return self.backend.info

    def submit(self, request: Request, *, arrived_at: float) -> ActiveRequest:
        """Admit or queue a request.

        Raises:
            Overloaded: a gate refused it.
            Draining: this daemon takes nothing new.
            InvalidRequest: it can never fit.
        """
        try:
            self.check_open()
            if request.request_id in self.active:
                raise InvalidRequest(f"request id {request.request_id!r} is in flight already", "X-Request-Id")
            settings = self.settings
            request, setting = classify(request, self.admission.queue, settings.deadline_s, settings.slo.ttft_s)
            state_bytes, now = self.backend.state_bytes(request.state_tokens, request.num_choices), time.monotonic()
            demand = demand_of(request, state_bytes, setting, now - arrived_at)
            is_queued = self.admission.offer(demand, now) == "queued"
        except Exception as e:
            self.count_refused(e)
            if isinstance(e, Overloaded):
                log.warning("request shed", extra={"request_id": request.request_id, "gate": e.gate, "why": str(e)})
            raise
        active = ActiveRequest(self, request, demand, arrived_at, is_queued=is_queued)
        self.active[request.request_id] = active
        self._idle.clear()
        self.start_admitted()
        return active

    def check_open(self) -> None:
        """Raises Draining when nothing new is taken."""
        if self.is_stopping:
            raise Draining("this server is stopping and takes no new requests; send them elsewhere")
        if self.is_draining:
            raise Draining("this server is draining and takes no new requests (decodectl resume takes work again)")

    def count_refused(self, error: Exception) -> None:
        """Count a request that ends before it was admitted, here or in the API."""
        outcome = "shed" if self.count_shed(error) else "invalid" if isinstance(error, InvalidRequest) else "error"
        self.metrics.requests.labels("none", outcome).inc()

    def count_shed(self, error: Exception) -> bool:
        """Whether it is a gate that says so, which is then counted."""
        if not isinstance(error, Overloaded | Draining):
            return False
        self.metrics.shed.labels(error.gate if isinstance(error, Overloaded) else "draining").inc()
        return True

    def set_limits(self, limits: AdmissionLimits) -> None:
        """Take over limits and classes (also by reload); who fits now runs."""
        self.admission.set_limits(limits)
        for name in self.admission.queue.classes:
            self.metrics.show_class(name)
        self.start_admitted()

    def _queue_lengths(self) -> dict[str, int]:
        return {name: queue.tenants.num_requests for name, queue in self.admission.queue.classes.items()}

    def forget(self, active: ActiveRequest) -> None:
        """A request ended: free its admission, start who waited, keep its record for `explain`."""
        request_id = active.request.request_id
        self.active.pop(request_id, None)
        self._admit(self.admission.release(request_id, time.monotonic(), active.num_output_tokens))
        self.records[request_id] = RequestRecord(active.decisions, active.report, active.num_output_tokens)
        while len(self.records) > _KEPT_RECORDS:
            self.records.popitem(last=False)
        if not self.active:
            self._idle.set()

    def abort_all(self, why: str) -> None:
        """End what is in flight with an error instead of a torn connection."""
        for active in list(self.active.values()):
            active.abort(Draining(why))

    def start_admitted(self) -> None:
        """Let those run who fit now."""
        self._admit(self.admission.pump(time.monotonic()))

    def _admit(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.active[request_id].admit()

    async def wait_idle(self) -> None:
        """Until no request is in flight."""
        await self._idle.wait()

    def peer_tokens(self, peer: str, prefixes: Prefixes | None, limit: int) -> int:
        """The longest point of a prompt, up to `limit`, from which a peer can go on."""
        return self.directory.num_cached_tokens(peer, prefixes, limit) if self.directory is not None else 0

    def client(self, name: str) -> PeerClient | None:
        """The peer of that name, if it is still configured."""
        return next((p for p in self.peers() if p.name == name), None)

    def has_ready_peer(self, other_than: str) -> bool:
        """Whether a request could go to another peer now."""
        return any(p.state == "ready" and p.name != other_than for p in self.peers())

    def is_peer_joining(self, failed_peers: Collection[str]) -> bool:
        """Whether none is ready but one is being connected to that has not failed yet."""
        states = {p.state for p in self.peers() if p.name not in failed_peers}
        return self._peers_changed is not None and "connecting" in states and "ready" not in states

    async def wait_for_peer(self, failed_peers: Collection[str]) -> None:
        """While `is_peer_joining`, JOIN_WAIT_S at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_WAIT_S):
                while self._peers_changed is not None and self.is_peer_joining(failed_peers):
                    await self._peers_changed()

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, and why not: draining, a dead engine, or work that waits while nothing moves."""
        stats = self.backend.stats()
        if not stats.is_alive:
            return False, "the engine is dead"
        if self.is_draining:
            return False, "draining"
        stalled = self._stalled_for(stats)
        if stalled > self.settings.stall_s:
            return False, f"{len(self.active)} requests wait and no token came for {stalled:.0f} s (health.stall)"
        if not self.peers():
            return True, "ready; no prefill peer is configured"
        if not any(p.state == "ready" for p in self.peers()):
            return True, "degraded: no prefill peer is usable"
        return True, "ready"

    def is_healthy(self) -> bool:
        """Whether systemd's watchdog should be fed: the engine lives and nothing is stuck."""
        stats = self.backend.stats()
        return stats.is_alive and self._stalled_for(stats) <= self.settings.stall_s

    def version(self) -> dict[str, Any]:
        """What /version and `decodectl version` answer."""
        return version_facts("decoded", self.info.name)

    def update_gauges(self) -> None:
        """Bring up to date what the engine counts, and what is routed by; called twice a second and cheap."""
        self.router.control(time.monotonic())
        m = self.metrics
        stats = self.backend.stats()
        held = stats.state_bytes
        before, self._counted = self._counted, stats
        m.mixed_tokens.inc(stats.mixed_tokens - before.mixed_tokens)
        m.mixed_s.inc(stats.mixed_s - before.mixed_s)
        m.preemptions.inc(stats.num_preemptions - before.num_preemptions)
        m.mixed_chunk.set(stats.mixed_chunk_tokens)
        m.rows.set(stats.num_rows)
        m.warm.set(stats.is_warm)
        m.row_waiters.set(stats.num_running - stats.num_rows)
        for spec in self.info.layout.states:
            m.state_bytes.labels(spec.kind).set(held.get(spec.kind, 0))

    def _stalled_for(self, stats: BackendStats) -> float:
        if not self.active:
            return 0.0
        oldest = min(a.arrived_at for a in self.active.values())
        return time.monotonic() - max(oldest, self.last_output_at, stats.last_progress_at)
