"""decoded's wiring: engine, peers, HTTP, control verbs; start, drain, reload, stop. Decides nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable

from aiohttp import web

from common.cachemetrics import CacheMetrics
from common.certificates import CertificateWatch
from common.config import changes, read_lines, restart_problems
from common.control import http_routes
from common.daemon import FakePeer, Handler
from common.errors import EngineDead, PdError
from common.loading import LoadingPage
from common.looplag import LoopLag
from common.metrics import Metrics
from common.net.options import LocalEnd, Security
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.fallback import FallbackBudget
from common.policy.slo import SloTargets
from common.profiler import Node, Profiler
from common.profiles import load_profile
from common.release import version
from common.text.tokenizer import Tokenizer
from common.wire.lossy import LOSSY
from common.wiring import (
    RELOADABLE_SECURITY,
    local_end,
    make_backend,
    make_security,
    make_trace,
    reload_security,
    security_changes,
)
from decoded import codec_report, verbs
from decoded.api.app import KEY_RING, make_app, make_runner
from decoded.api.auth import KeyRing
from decoded.api.contract import ApiSettings
from decoded.config import DecodeConfig
from decoded.dispatch import Dispatcher
from decoded.fakepeer import WARNING, FakePrefilld
from decoded.learned import Learned
from decoded.metrics import DecodeMetrics
from decoded.peers import PeerSet
from decoded.probing import PathProber
from decoded.replicate import Replicator
from decoded.settings import DispatchSettings

log = logging.getLogger(__name__)
_RELOADABLE = (
    *("peers", "routing", "fallback", "admission", "slo", "health", "log.level", "log.format", "drain"),
    *RELOADABLE_SECURITY,
)
_WARM_UP_S = 5.0
# Decode steps of up to so many rows are made ready while nobody asks for any; of more, when they come.
WARM_UP_ROWS = 16


class DecodeService:
    """One decoded process."""

    on_fatal: Callable[[PdError], None]

    def __init__(self, config: DecodeConfig, fake_peer: FakePeer | None = None) -> None:
        self.config, self._fake_peer = config, fake_peer
        self.warning = "" if fake_peer is None else WARNING
        self.metrics = Metrics("decoded", version())
        self.decode_metrics = DecodeMetrics(self.metrics.registry)
        self._cache_metrics = CacheMetrics(self.metrics.registry)
        self._loop_lag = LoopLag(self.metrics)
        self._certificates = CertificateWatch(self.metrics.registry)
        self.trace = make_trace(config)
        self.backend = make_backend(
            config,
            max_batch=config.batch.max_batch,
            token_budget=config.batch.token_budget,
            max_stretch=config.batch.max_stretch,
            warm_up_rows=min(config.batch.max_batch, WARM_UP_ROWS),
        )
        self.started_at = time.monotonic()
        self.tokenizer: Tokenizer
        self.peers: PeerSet
        self._prober: PathProber
        self._replicator: Replicator
        self.dispatcher: Dispatcher
        self.profiler: Profiler
        self._fake: FakePrefilld | None = None
        self._page = LoadingPage()
        self._runner: web.AppRunner | None = None
        self._keys: KeyRing | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model, connect the peers, then serve. Raises StartupError."""
        config = self.config
        await self._page.open(config.http.host, config.http.port, "http.port", config.http.max_connections)
        log.info("loading the model", extra={"path": str(config.model.path or "fake")})
        await self.backend.start()
        self.metrics.tell_model(self.backend.info.name, self.backend.info.numerics)
        self._check_codec()
        self.tokenizer = await asyncio.to_thread(_load_tokenizer, config)
        if not self.tokenizer.has_chat_template:
            log.info("/v1/chat/completions is not available: the model has no chat template")
        policy = config.peer_policy.require_same_numerics
        # A pretended peer is in this process, on loopback.
        security = make_security(config, "decode") if self._fake_peer is None else Security()
        end = local_end(config, "decode", self.backend.info, security, require_same_numerics=policy)
        self.peers = PeerSet(end, config, self.decode_metrics, self.trace)
        self._prober = PathProber(self.peers.clients, self.decode_metrics, lambda: self.config.routing.probe_interval)
        self.dispatcher = self._make_dispatcher()
        self.dispatcher.router.learned = Learned(load_profile(config.node.state_dir, self.backend.info))
        self.dispatcher.directory, self.dispatcher.trace = self.peers.directory, self.trace
        self._replicator = Replicator(self.dispatcher, lambda: self.config.routing.replicate_share)
        self.profiler = self._make_profiler()
        await self._start_peers(end)
        await self._start_http()
        self._watch = asyncio.create_task(self._watch_engine())
        self._prober.start()
        if self.backend.cache is not None:
            self._replicator.start()
        self._loop_lag.start()
        log.info("serving", extra={"model": self.backend.info.name, "num_peers": len(self.peers)})

    def _check_codec(self) -> None:
        """A lossy codec has to have been checked with this model. Raises StartupError."""
        config = self.config
        if config.stream.codec in LOSSY:
            folder, bar = config.node.state_dir, config.codec.min_agreement
            report = codec_report.require(folder, config.stream.codec, self.backend.info, bar)
            facts = {"codec": report.codec, "top1_agreement": report.top1_agreement, "kl_mean": report.kl_mean}
            log.warning("state is rounded on its way: the codec is lossy", extra=facts)

    async def drain(self, timeout: float) -> None:
        """On the way to `stop`: shed new requests, finish those in flight."""
        self.dispatcher.is_stopping = True
        self.set_draining(True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.dispatcher.wait_idle()

    async def stop(self) -> None:
        """Cancel what is in flight, with an error for its client, and release everything."""
        self._loop_lag.close()
        if self._watch is not None:
            self._watch.cancel()
        async with contextlib.AsyncExitStack() as last:
            # Runs from the bottom up, each whatever happens to the others.
            if self.trace is not None:
                last.callback(self.trace.close)
            last.push_async_callback(self.backend.close)
            if self._fake is not None:
                last.push_async_callback(self._fake.close)
            if hasattr(self, "peers"):  # start() may have failed before
                last.push_async_callback(self.peers.close)
            if hasattr(self, "_replicator"):
                last.push_async_callback(self._prober.close)
                last.push_async_callback(self._replicator.close)
            if self._runner is not None:
                last.push_async_callback(self._runner.cleanup)
            last.push_async_callback(self._page.close)
            await self._abort_requests()

    async def _abort_requests(self) -> None:
        if hasattr(self, "dispatcher"):
            self.dispatcher.abort_all("this server stops before the request could finish; send it again elsewhere")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.dispatcher.wait_idle()

    def restart_problems(self, config: DecodeConfig) -> list[str]:
        """Changes that may not be made while running."""
        return restart_problems(self.config, config, _RELOADABLE)

    async def reload(self, config: DecodeConfig) -> list[str]:
        """Take over what changed. Raises ConfigError for a certificate that does not hold."""
        security = reload_security(config, "decode", time.time())
        changed = changes(self.config, config) + self._reload_api_keys(config)
        if self._fake is None:
            changed += security_changes(self.peers.end.security, security)
            self.peers.set_security(security)
        was_set = self.dispatcher.settings.threshold_tokens
        if was_set != _settings(self.config).threshold_tokens:
            text = "auto" if was_set is None else f"{was_set:g}"
            changed.append(f"routing.threshold_tokens: {text} of `decodectl threshold` no longer holds")
        self.config = config
        self.dispatcher.fallback.set_rate(config.fallback.local_prefill_tokens_per_s, config.fallback.burst_tokens)
        self.dispatcher.settings = _settings(config)
        self.dispatcher.set_limits(_limits(config))
        if self._fake is None:
            await self.peers.update(config.peers)
        return changed

    def _reload_api_keys(self, config: DecodeConfig) -> list[str]:
        """Take over what the file holds now; says how many are new and gone, never which."""
        if self._keys is None or config.http.api_key_file is None:
            return []
        num_added, num_removed, num_moved = self._keys.replace(read_lines(config.http.api_key_file))
        if not num_added and not num_removed and not num_moved:
            return []
        moved = f", {num_moved} of another class" if num_moved else ""
        return [f"http.api_key_file: {num_added} key{'s' * (num_added != 1)} added, {num_removed} removed{moved}"]

    def is_healthy(self) -> bool:
        """False when the engine is dead, or work waits and makes no progress."""
        return self.dispatcher.is_healthy()

    def control_handlers(self) -> dict[str, Handler]:
        """Verbs of decodectl."""
        return verbs.handlers(self)

    def set_draining(self, is_draining: bool) -> None:
        """Shed new requests from now on, or take them again."""
        self.dispatcher.is_draining = is_draining
        self.decode_metrics.draining.set(is_draining)
        log.info("draining" if is_draining else "taking work", extra={"num_active": len(self.dispatcher.active)})

    def set_threshold(self, num_tokens: float | None) -> None:
        """Until the next reload or restart; None: solved while running."""
        self.dispatcher.settings.threshold_tokens = num_tokens
        text = "auto" if num_tokens is None else "inf" if math.isinf(num_tokens) else f"{num_tokens:g}"
        log.info("threshold set", extra={"threshold_tokens": text})

    def _make_dispatcher(self) -> Dispatcher:
        config = self.config
        fallback = FallbackBudget(config.fallback.local_prefill_tokens_per_s, config.fallback.burst_tokens)
        return Dispatcher(
            self.backend,
            self.peers.clients,
            admission=AdmissionController(_limits(config)),
            fallback=fallback,
            settings=_settings(config),
            metrics=self.decode_metrics,
            peer_warning=self.warning,
            peers_changed=self.peers.changed,
        )

    def _make_profiler(self) -> Profiler:
        config, dispatcher = self.config, self.dispatcher
        node = Node("decoded", config.node.name, config.node.state_dir, config.batch.max_batch)
        registry = self.metrics.registry
        return Profiler(self.backend, dispatcher.admission, node, lambda key: dispatcher.active[key].admit(), registry)

    async def _start_peers(self, end: LocalEnd) -> None:
        """READY means that links to live peers are warm; a peer that is away must not hold the start up for long."""
        peers = self.config.peers
        if self._fake_peer is not None:
            self._fake = FakePrefilld(self.config, end, self._fake_peer)
            peers = (await self._fake.start(),)
            log.warning(WARNING)
        await self.peers.update(peers)
        await self.peers.wait_warm(_WARM_UP_S)
        for client in self.peers.clients():
            if client.state != "ready":
                log.warning("degraded: peer is not usable", extra={"peer": client.name, "why": client.reason})
        if not peers:
            log.info("no prefill peer is configured: all prompts are computed here")

    async def _start_http(self) -> None:
        http = self.config.http
        settings = ApiSettings(
            default_max_tokens=http.default_max_tokens,
            max_body_bytes=http.max_body_bytes,
            max_bulk_bodies=http.max_bulk_bodies,
            max_total_body_bytes=http.max_total_body_bytes,
            max_connections=http.max_connections,
            sse_comment_s=http.sse_comment,
            allow_route_override=http.allow_route_override,
            warning=self.warning,
            api_keys=read_lines(http.api_key_file) if http.api_key_file is not None else (),
        )
        app = make_app(self.dispatcher, self.tokenizer, settings, self.metrics.registry)
        self._keys = app[KEY_RING]
        app.router.add_routes(http_routes(verbs.handlers(self)))
        self._runner = make_runner(app)
        await self._page.hand_over(self._runner)

    async def _watch_engine(self) -> None:
        """A dead engine ends the process; systemd starts a new one. Also keeps gauges fresh and the trace on disk."""
        while self.backend.stats().is_alive:
            self.dispatcher.update_gauges()
            self._cache_metrics.update(self.backend.cache)
            own = self.peers.end.security.certificate
            certificates = {} if own is None else {own.name: own.expires_at}
            self._certificates.update(certificates, self.peers.certificates, time.time())
            if self.trace is not None:
                self.trace.flush()
            await asyncio.sleep(0.5)
        self.on_fatal(EngineDead("the engine died"))


def _load_tokenizer(config: DecodeConfig) -> Tokenizer:
    if config.model.path is not None:
        return Tokenizer.load(config.model.path)
    return Tokenizer.bytes_only()


def _limits(config: DecodeConfig) -> AdmissionLimits:
    admission = config.admission
    return AdmissionLimits(
        admission.max_running_requests,
        admission.max_queued_requests,
        admission.max_queued_tokens,
        admission.max_state_bytes,
        retry_after_s=admission.retry_after,
        max_rows=config.batch.max_batch,
        large_prompt_tokens=admission.large_prompt_tokens,
        large_queue_share=admission.large_queue_share,
        classes=admission.service_classes,
    )


def _settings(config: DecodeConfig) -> DispatchSettings:
    threshold = config.routing.threshold_tokens
    return DispatchSettings(
        mode=config.routing.mode,
        threshold_tokens=None if threshold is None else float(threshold),
        max_attempts=config.fallback.attempts,
        progress_timeout_s=config.stream.progress_timeout,
        stall_s=config.health.stall,
        push=config.routing.push,
        deadline_s=config.admission.deadline,
        slo=SloTargets(config.slo.ttft, config.slo.tpot),
        max_stretch=config.batch.max_stretch,
        own_peers=frozenset(p.name for p in config.peers if p.site == "own"),
    )
