"""prefilld's wiring: engine, listener, HTTP, control verbs; start, drain, reload, stop. Decides nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from common.cachemetrics import CacheMetrics, cache_handlers
from common.certificates import CertificateWatch
from common.config import changes, restart_problems
from common.control import bind_http
from common.daemon import FakePeer, Handler, version_facts
from common.errors import EngineDead, PdError
from common.http_server import Guard
from common.layout import numerics_differ, numerics_text
from common.logs import Damper
from common.looplag import LoopLag
from common.metrics import Metrics
from common.net.server import PrefillServer
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.codec import CodecChoice
from common.policy.egress import Egress, EgressLimits
from common.profiler import Node, Profiler
from common.profiles import load_profile
from common.release import version
from common.sched.deadlines import send_order
from common.wire.codec import CODECS
from common.wire.connection import Closed
from common.wire.session import StreamRefused
from common.wiring import (
    RELOADABLE_SECURITY,
    bench_security,
    check_port,
    link_options,
    local_end,
    make_backend,
    make_security,
    make_trace,
    reload_security,
    security_changes,
    security_status,
)
from prefilld.cachefeed import CacheFeed
from prefilld.config import PrefillConfig
from prefilld.egress_notes import EgressWarnings, egress_note
from prefilld.fakepeer import FakeDecoded
from prefilld.http import make_app, make_runner
from prefilld.learned import LearnedCost
from prefilld.metrics import PrefillMetrics
from prefilld.refused import RefusedPeers
from prefilld.stream import StreamHandler

log = logging.getLogger(__name__)
_STALL_S = 60.0
_RELOADABLE = ("limits", "egress", "log.level", "log.format", "drain", *RELOADABLE_SECURITY)


class PrefillService:
    """One prefilld process."""

    on_fatal: Callable[[PdError], None]

    def __init__(self, config: PrefillConfig, fake_peer: FakePeer | None = None) -> None:
        self.config, self._fake_peer = config, fake_peer
        self._metrics = Metrics("prefilld", version())
        self._prefill_metrics = PrefillMetrics(self._metrics.registry)
        self._cache_metrics = CacheMetrics(self._metrics.registry)
        self._loop_lag = LoopLag(self._metrics)
        self._certificates = CertificateWatch(self._metrics.registry)
        self._trace = make_trace(config)
        self._backend = make_backend(config)
        self._admission = AdmissionController(_limits(config))
        self._handler = StreamHandler(
            self._backend,
            self._admission,
            self._prefill_metrics,
            max_staged_bytes=config.stream.max_staged_bytes,
            max_prompt_tokens=config.limits.max_prompt_tokens,
            progress_timeout_s=config.stream.progress_timeout,
            trace=self._trace,
        )
        node = Node("prefilld", config.node.name, config.node.state_dir)
        self._profiler = Profiler(self._backend, self._admission, node, self._handler.admit, self._metrics.registry)
        self._egress = Egress(EgressLimits(config.egress.max_bps, config.egress.share))
        self._egress_warnings = EgressWarnings(self._egress.limits)
        self._server: PrefillServer | None = None
        self._feed: CacheFeed | None = None
        self._runner: web.AppRunner | None = None
        self._fake: FakeDecoded | None = None
        self._watch: asyncio.Task[None] | None = None
        self._started_at = time.monotonic()
        self._refusals = Damper()
        self._refused_peers = RefusedPeers()
        self._counted_bytes = (0, 0)
        self._known_peers: set[tuple[str, str, str]] = set()
        self._counted_resent = 0

    async def start(self) -> None:
        """Load the model, then listen. Raises StartupError."""
        config = self.config
        check_port(config.listen.host, config.listen.port, "listen.port")
        check_port(config.http.host, config.http.port, "http.port")
        log.info("loading the model", extra={"path": str(config.model.path or "fake")})
        await self._backend.start()
        self._metrics.tell_model(self._backend.info.name, self._backend.info.numerics)
        profile = load_profile(config.node.state_dir, self._backend.info)
        self._handler.learned = LearnedCost(profile.cost() if profile is not None else None)
        security = make_security(config, "prefill")
        if self._fake_peer is not None:
            security = bench_security(security)
        end = local_end(config, "prefill", self._backend.info, security)
        self._server = PrefillServer(
            end, link_options(config), self._handler, load=self._load, egress=self._egress, trace=self._trace
        )
        self._server.order = send_order
        self._server.choosers = {codec: CodecChoice() for codec in CODECS if codec != "raw"}
        self._server.on_refused, self._server.on_lost = self._on_refused, self._on_lost
        self._server.on_stream_refused = self._on_stream_refused
        if self._backend.cache is not None:
            self._feed = CacheFeed(self._backend.cache, self._server)
        await self._server.start(config.listen.host, config.listen.port)
        app = make_app(
            readiness=self._readiness,
            metrics=self._render_metrics,
            handlers=self.control_handlers(),
            guard=Guard(self._metrics.registry, config.http.max_connections),
        )
        self._runner = make_runner(app)
        port = await bind_http(self._runner, config.http.host, config.http.port, "http.port")
        self._watch = asyncio.create_task(self._watch_engine())
        self._loop_lag.start()
        if self._fake_peer is not None:
            end = local_end(config, "decode", self._backend.info, security)
            self._fake = FakeDecoded(end, link_options(config), self._server.port, self._fake_peer)
            await self._fake.start()
        log.info("serving", extra={"model": self._backend.info.name, "port": self._server.port, "http_port": port})

    async def drain(self, timeout: float) -> None:
        """Refuse new work, tell the peers, wait until everything computed was delivered."""
        if self._fake is not None:
            # First, or what it asked for a moment ago would be refused with a warning.
            await self._fake.close()
        self._set_draining(True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._handler.wait_idle()

    async def stop(self) -> None:
        """Cancel what is in flight and release everything."""
        self._loop_lag.close()
        if self._watch is not None:
            self._watch.cancel()
        async with contextlib.AsyncExitStack() as last:
            # Runs from the bottom up, each whatever happens to the others.
            if self._trace is not None:
                last.callback(self._trace.close)
            last.push_async_callback(self._backend.close)
            if self._feed is not None:
                last.callback(self._feed.close)
            if self._runner is not None:
                last.push_async_callback(self._runner.cleanup)
            if self._server is not None:
                last.push_async_callback(self._server.close)
            if self._fake is not None:
                last.push_async_callback(self._fake.close)

    def restart_problems(self, config: PrefillConfig) -> list[str]:
        """Changes that may not be made while running."""
        return restart_problems(self.config, config, _RELOADABLE)

    async def reload(self, config: PrefillConfig) -> list[str]:
        """Take over what changed. Raises ConfigError for a certificate that does not hold."""
        security = reload_security(config, "prefill", time.time())
        changed = changes(self.config, config)
        if self._server is not None and self._fake is None:
            changed += security_changes(self._server.local.security, security)
            self._server.set_security(security)
        self.config = config
        self._admission.limits = _limits(config)
        limits = EgressLimits(config.egress.max_bps, config.egress.share)
        if limits != self._egress.limits:
            self._egress.limits, self._egress_warnings = limits, EgressWarnings(limits)
        self._handler.max_prompt_tokens = config.limits.max_prompt_tokens
        self._handler.start_admitted()
        return changed

    def is_healthy(self) -> bool:
        """False when the engine is dead, or has work and makes no progress."""
        stats = self._backend.stats()
        if not stats.is_alive:
            return False
        is_busy = any(not r.is_sending for r in self._handler.active.values())
        return not is_busy or time.monotonic() - stats.last_progress_at < _STALL_S

    def control_handlers(self) -> dict[str, Handler]:
        """Verbs of prefillctl."""

        async def drain(_: dict[str, Any]) -> Any:
            self._set_draining(True)
            return self._status()

        async def resume(_: dict[str, Any]) -> Any:
            self._set_draining(False)
            return self._status()

        return {
            "status": self._answer("status"),
            "peers": self._answer("peers"),
            "requests": self._answer("requests"),
            "version": self._answer("version"),
            "drain": drain,
            "resume": resume,
            "profile": self._profiler.run,
            **cache_handlers(lambda: self._backend.cache),
        }

    def _answer(self, verb: str) -> Handler:
        async def answer(_: dict[str, Any]) -> Any:
            return self._fact(verb)

        return answer

    def _fact(self, verb: str) -> Any:
        if verb == "status":
            return self._status()
        if verb == "peers":
            return [*self._peers(), *self._refused_peers.rows(time.monotonic())]
        if verb == "requests":
            return [r.facts(time.monotonic()) for r in self._handler.active.values()]
        return version_facts("prefilld", self._backend.info.name)

    def _peers(self) -> list[dict[str, Any]]:
        ours = self._backend.info.numerics
        rows = self._server.sessions if self._server is not None else []
        limits, busy = self._egress.limits, self._handler.sharing.busy_shares(time.monotonic())
        return [
            {
                **row,
                "busy_share": round(busy.get(str(row["name"]), 0.0), 3),
                "numerics_differ": numerics_differ(ours, row["numerics"]),
                "egress_note": egress_note(limits, row),
            }
            for row in rows
        ]

    def _look_at_sessions(self) -> None:
        """Warnings about each session, which begins without asking anybody here."""
        rows = self._peers()
        self._egress_warnings.look(rows)
        self._handler.sharing.look(rows, time.monotonic())
        here = {(row["name"], row["instance_id"], row["address"]): row["numerics_differ"] for row in rows}
        for who in here.keys() - self._known_peers:
            if here[who]:
                text = numerics_text(here[who])
                log.warning("%s: its tokens depend on where a prompt is computed", text, extra={"peer": who[0]})
        self._known_peers = set(here)

    def _state(self) -> str:
        if not self._handler.is_draining:
            return "ready"
        return "draining" if self._handler.active else "drained"

    def _status(self) -> dict[str, Any]:
        stats, info = self._backend.stats(), self._backend.info
        return {
            "daemon": "prefilld",
            "node": self.config.node.name,
            "version": version(),
            "state": self._state(),
            "is_healthy": self.is_healthy(),
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "model": info.facts,
            "security": security_status(self._server.local.security, time.time()) if self._server is not None else {},
            "num_peers": len(self._server.sessions) if self._server is not None else 0,
            "num_running": len(self._admission.running),
            "num_queued": len(self._admission.queue),
            "num_queued_tokens": self._admission.num_queued_tokens,
            "num_prompt_tokens": stats.num_prompt_tokens,
            "prefill_cost": self._handler.learned.facts(),
            "state_bytes": dict(stats.state_bytes),
        }

    def _load(self, peer: str) -> dict[str, float]:
        """Facts for Status messages to a peer."""
        tokens = sum(r.num_tokens - r.num_computed_tokens for r in self._handler.active.values())
        return {
            "num_running": len(self._admission.running),
            "num_queued": len(self._admission.queue),
            "num_queued_tokens": tokens,
            "prefill_tokens_per_s": self._backend.stats().alone_tokens_per_s,
            "chunk_tokens": int(self._backend.info.numerics["chunk_tokens"]),
            **self._handler.learned.load(),
            **self._handler.sharing.load(peer, self._egress.limits.max_bps, time.monotonic()),
        }

    def _on_refused(self, closed: Closed, address: str) -> None:
        """Somebody knocked and was not let in: counted always, logged at most once a minute for each host."""
        self._prefill_metrics.handshakes_failed.labels(closed.code).inc()
        self._refused_peers.add(address, closed.code, str(closed.error), time.monotonic())
        num_held = self._refusals.admit(address.rpartition(":")[0])
        if num_held is not None:
            extra = {"peer": address, "code": closed.code, "num_more_like_it": num_held or None}
            log.warning("connection refused before its handshake was done: %s", closed.error, extra=extra)

    def _on_lost(self, closed: Closed, peer: str) -> None:
        self._prefill_metrics.links_lost.labels(closed.code).inc()
        if closed.is_fault:
            self._prefill_metrics.link_faults.labels(closed.code).inc()
        level = logging.WARNING if closed.is_fault else logging.INFO
        log.log(level, "link closed: %s", closed.error, extra={"peer": peer, "code": closed.code})

    def _on_stream_refused(self, refused: StreamRefused, peer: str) -> None:
        """The network layer refused by itself what never reached the handler."""
        gate, request_id = refused.error.wire_code, refused.prefill.request_id
        self._prefill_metrics.prefills.labels("refused").inc()
        self._prefill_metrics.refused.labels(gate).inc()
        extra = {"peer": peer, "request_id": request_id}
        log.warning("prefill refused by gate %s: %s", gate, refused.error, extra=extra)

    def _set_draining(self, is_draining: bool) -> None:
        self._handler.is_draining = is_draining
        self._prefill_metrics.draining.set(is_draining)
        if self._server is not None:
            self._server.set_draining(is_draining)
        log.info("draining" if is_draining else "taking work", extra={"num_active": len(self._handler.active)})

    def _readiness(self) -> tuple[bool, str]:
        if not self.is_healthy():
            return False, "the engine is dead or makes no progress"
        return (False, self._state()) if self._handler.is_draining else (True, "ready")

    def _render_metrics(self) -> bytes:
        m = self._prefill_metrics
        self._cache_metrics.update(self._backend.cache)
        m.running.set(len(self._admission.running))
        m.queued.set(len(self._admission.queue))
        m.queued_tokens.set(self._admission.num_queued_tokens)
        m.show_busy(self._handler.sharing.busy_shares(time.monotonic()))
        if self._server is not None:
            m.sessions.set(self._server.num_sessions)
            m.links.set(self._server.num_links)
            traffic, before = self._server.traffic, self._counted_bytes
            for direction, num, counted in zip(("in", "out"), traffic, before, strict=True):
                m.link_bytes.labels(direction).inc(max(0, num - counted))
            self._counted_bytes = traffic
            m.show_paths(self._server.paths)
            m.resent_bytes.inc(self._egress.resent_bytes - self._counted_resent)
            self._counted_resent = self._egress.resent_bytes
        held = self._backend.stats().state_bytes
        for spec in self._backend.info.layout.states:
            m.state_bytes.labels(spec.kind).set(held.get(spec.kind, 0))
        return self._metrics.render()

    async def _watch_engine(self) -> None:
        """A dead engine ends the process; systemd starts a new one. Also keeps the trace on disk."""
        while self._backend.stats().is_alive:
            self._look_at_sessions()
            self._watch_certificates()
            if self._trace is not None:
                self._trace.flush()
            await asyncio.sleep(0.5)
        self.on_fatal(EngineDead("the engine died"))

    def _watch_certificates(self) -> None:
        if self._server is not None:
            own = self._server.local.security.certificate
            certificates = {} if own is None else {own.name: own.expires_at}
            self._certificates.update(certificates, self._server.certificates, time.time())


def _limits(config: PrefillConfig) -> AdmissionLimits:
    limits = config.limits
    return AdmissionLimits(
        limits.max_running_requests,
        limits.max_queued_requests,
        limits.max_queued_tokens,
        limits.max_state_bytes,
        section="limits",
    )
