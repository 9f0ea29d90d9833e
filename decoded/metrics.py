"""decoded's own metrics. One sample each as its HELP says; durations in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.policy.routing import FALLBACK_REASONS, REASONS
from common.policy.slo import TARGETS

if TYPE_CHECKING:
    from decoded.router import Router

_TTFT_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
_SECONDS_BUCKETS = (*_TTFT_BUCKETS, 600, 1200)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4, 10)
OUTCOMES = ("ok", "cancelled", "shed", "invalid", "error")
GATES = (
    *("queued_requests", "tenant_requests", "queued_tokens", "large_prompt", "deadline"),
    *("fallback", "draining", "body_bytes", "bulk_bodies"),
)
DEADLINE_STAGES = ("queue", "prefill")
_ITL_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class _QueueLengths(Collector):
    """A gauge per class, as long as there is such a class."""

    def __init__(self, lengths: Callable[[], Mapping[str, int]]) -> None:
        self._lengths = lengths

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "prfaas_queued_requests", "Requests waiting for admission, by class.", labels=["class"]
        )
        for name, num in self._lengths().items():
            family.add_metric([name], num)
        yield family


class _Stages(Collector):
    """How busy each stage would be at the throughput that can be served; nothing before that is solved."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "prfaas_stage_duty_ratio",
            "Part of its time that a stage would work if requests came as fast as the sites can serve them.",
            labels=["stage"],
        )
        found = self._router.allocation
        for stage, duty in (found.now.duty if found is not None else {}).items():
            family.add_metric([stage], duty)
        yield family


class _Shares(Collector):
    """What of each peer's time is left for this decoded, as long as the peer is usable."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "prfaas_peer_share_ratio",
            "Part of a usable peer's time that this decoded can count on, as others use the rest; 1 is all.",
            labels=["peer"],
        )
        for name, share in self._router.shares.items():
            family.add_metric([name], share)
        yield family


class DecodeMetrics:
    """All of decoded's counters, gauges and histograms on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        r = self._registry = registry
        self.offload_failures = Counter(
            "prfaas_offload_failures_total",
            "Remote prefills that did not deliver, by peer and error.",
            ["peer", "error"],
            registry=r,
        )
        self.links_lost = Counter(
            "prfaas_links_lost_total",
            "Open links that closed and neither end had left, by error code (eof; link_lost: silence, a lost session).",
            ["peer", "code"],
            registry=r,
        )
        self.link_faults = Counter(
            "prfaas_link_faults_total",
            "Open links that closed since the protocol was broken or bytes were damaged on the way, by error code.",
            ["peer", "code"],
            registry=r,
        )
        self.handshakes_failed = Counter(
            "prfaas_handshakes_failed_total",
            "Connections that this end or the peer refused for keys, certificates, versions or models, by error code.",
            ["peer", "code"],
            registry=r,
        )
        self.fallbacks = Counter(
            "prfaas_fallback_total", "Prompts prefilled here although remote was wanted.", ["reason"], registry=r
        )
        self.routes = Counter("prfaas_routes_total", "Routing decisions.", ["route", "reason"], registry=r)
        self.prompt_tokens = Counter("prfaas_prompt_tokens_total", "Prompt tokens by route.", ["route"], registry=r)
        self.output_tokens = Counter(
            "prfaas_output_tokens_total", "Output tokens of all choices that were handed on, as they come.", registry=r
        )
        self._make_transfers(r)
        self._make_outcomes(r)
        self._make_histograms(r)
        self._make_engine_counters(r)
        self._make_gauges(r)
        self._show_known_labels()

    def _make_transfers(self, r: CollectorRegistry) -> None:
        self.wire_bytes = Counter("prfaas_wire_bytes_total", "Encoded state bytes received.", ["peer"], registry=r)
        self.raw_bytes = Counter("prfaas_raw_bytes_total", "Decoded state bytes received.", ["peer"], registry=r)
        self.segments = Counter(
            "prfaas_segments_received_total",
            "Segments of state received, by codec: others than stream.codec were not worth encoding, or not finite.",
            ["peer", "codec"],
            registry=r,
        )
        self.pushed_bytes = Counter(
            "prfaas_pushed_bytes_total",
            "Encoded state bytes that decoded sent: of prefixes that a peer lacked, replicas among them.",
            ["peer"],
            registry=r,
        )
        self.replications = Counter(
            "prfaas_replications_total",
            "Hot prefixes sent to a peer before anybody asked it for them (routing.replicate_share), by result: ok,"
            " gone (decoded itself had lost it), error.",
            ["peer", "result"],
            registry=r,
        )
        self.replicated_tokens = Counter(
            "prfaas_replicated_tokens_total",
            "Tokens of those that arrived, which the peer lacked.",
            ["peer"],
            registry=r,
        )
        self.probed_bytes = Counter(
            "prfaas_probed_bytes_total",
            "Bytes that mean nothing, asked of a peer to see what its idle path carries (routing.probe_interval).",
            ["peer"],
            registry=r,
        )

    def watch_queue(self, lengths: Callable[[], Mapping[str, int]]) -> None:
        """Show how many requests of each class wait, as `lengths` says whenever somebody looks."""
        self._registry.register(_QueueLengths(lengths))

    def watch_router(self, router: Router) -> None:
        """Show what requests are routed by, whenever somebody looks."""
        self.threshold.set_function(lambda: router.threshold_tokens)
        self.threshold_factor.set_function(lambda: router.controller.factor)
        self.max_stretch.set_function(lambda: router.max_stretch)
        self._registry.register(_Stages(router))
        self._registry.register(_Shares(router))

    def note_prediction(self, route: str, predicted_s: float, actual_s: float) -> None:
        """What a request's first decision expected, and what came of it."""
        self.predicted_ttft.labels(route).observe(predicted_s)
        if actual_s > 0:
            self.ttft_error.labels(route).observe(predicted_s / actual_s)

    def show_class(self, name: str) -> None:
        """A label value that is not there yet would hide its first event from rate()."""
        self.queue_s.labels(name)
        for target in TARGETS:
            for result in ("met", "missed"):
                self.slo.labels(name, target, result)

    def _make_outcomes(self, r: CollectorRegistry) -> None:
        self.requests = Counter(
            "prfaas_requests_total",
            "Finished requests; one sample is one prompt, one outcome (ok, cancelled, shed, invalid, error). One that"
            " was refused before its prompts were known (invalid, or shed by a gate for bodies) is one sample.",
            ["route", "outcome"],
            registry=r,
        )
        self.shed = Counter(
            "prfaas_shed_total",
            "Requests refused by a gate, or given up by one after they were let in; exactly one sample each.",
            ["gate"],
            registry=r,
        )
        self.deadline_misses = Counter(
            "prfaas_deadline_misses_total",
            "Requests ended since their deadline passed before their first token: in the queue, or while their prompt"
            " was computed or about to be. They are in prfaas_shed_total too.",
            ["stage"],
            registry=r,
        )
        self.slo = Counter(
            "prfaas_slo_requests_total",
            "Requests that were let in and have ended, by whether they met slo.ttft, slo.tpot, and all of them: the"
            " rate of (all, met) is goodput. One that failed or was given up missed all; one whose client left is not"
            " counted.",
            ["class", "target", "result"],
            registry=r,
        )

    def _make_histograms(self, r: CollectorRegistry) -> None:
        self.ttft = Histogram(
            "prfaas_ttft_seconds",
            "Seconds from arrival to the first output token; one sample is one request.",
            ["route"],
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.predicted_ttft = Histogram(
            "prfaas_predicted_ttft_seconds",
            "Seconds from arrival to the first output token as the first routing decision expected them.",
            ["route"],
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.ttft_error = Histogram(
            "prfaas_ttft_prediction_ratio",
            "Expected by actual seconds to the first output token; one sample is one request.",
            ["route"],
            buckets=_RATIO_BUCKETS,
            registry=r,
        )
        self.itl = Histogram(
            "prfaas_itl_seconds",
            "Seconds between two output tokens of one choice; one sample is one gap.",
            buckets=_ITL_BUCKETS,
            registry=r,
        )
        self.queue_s = Histogram(
            "prfaas_queue_seconds",
            "Seconds from arrival to admission; one sample is one request that was admitted.",
            ["class"],
            buckets=(0.01, *_TTFT_BUCKETS),
            registry=r,
        )
        self.failed_remote = Histogram(
            "prfaas_failed_remote_seconds",
            "Seconds spent on a remote prefill that did not deliver; one sample is one attempt.",
            ["peer"],
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.seconds = Histogram(
            "prfaas_request_seconds",
            "Seconds from arrival to the last output token; one sample is one request with outcome ok.",
            ["route"],
            buckets=_SECONDS_BUCKETS,
            registry=r,
        )
        self.kept_tokens = Counter(
            "prfaas_kept_prompt_tokens_total",
            "Prompt tokens whose state was verified before their remote prefill failed, and kept.",
            registry=r,
        )

    def _make_engine_counters(self, r: CollectorRegistry) -> None:
        self.mixed_tokens = Counter(
            "prfaas_mixed_prefill_tokens_total",
            "Prompt tokens computed here in steps that also decoded running streams.",
            registry=r,
        )
        self.mixed_s = Counter(
            "prfaas_mixed_step_seconds_total", "Seconds that those steps took in all, decode rows included.", registry=r
        )
        self.preemptions = Counter(
            "prfaas_preemptions_total", "Times a sequence was put aside for another of higher priority.", registry=r
        )

    def _show_known_labels(self) -> None:
        """A label value that is not there yet would hide its first event from rate()."""
        for gate in GATES:
            self.shed.labels(gate)
        for reason in FALLBACK_REASONS:
            self.fallbacks.labels(reason)
        for route, reasons in REASONS.items():
            self.prompt_tokens.labels(route)
            self.ttft.labels(route)
            self.seconds.labels(route)
            for reason in reasons:
                self.routes.labels(route, reason)
            for outcome in OUTCOMES:
                self.requests.labels(route, outcome)
        for stage in DEADLINE_STAGES:
            self.deadline_misses.labels(stage)
        for outcome in ("shed", "invalid", "error"):
            self.requests.labels("none", outcome)

    def _make_gauges(self, r: CollectorRegistry) -> None:
        self.running = Gauge("prfaas_running_requests", "Requests admitted and not finished.", registry=r)
        self.queued_tokens = Gauge("prfaas_queued_prompt_tokens", "Prompt tokens of queued requests.", registry=r)
        self.state_bytes = Gauge(
            "prfaas_state_bytes", "State memory held by the engine, by kind.", ["kind"], registry=r
        )
        self.mixed_chunk = Gauge(
            "prfaas_mixed_chunk_tokens", "Prompt tokens of the last step that also decoded running streams.", registry=r
        )
        self.rows = Gauge(
            "prfaas_batch_rows", "Sequences in the running batch; batch.max_batch is the most.", registry=r
        )
        self.warm = Gauge(
            "prfaas_engine_warm",
            "1 once the engine has got ready for decode steps, in idle time after its start.",
            registry=r,
        )
        self.row_waiters = Gauge(
            "prfaas_row_waiting_sequences", "Sequences that are ready to decode and wait for a row.", registry=r
        )
        self.max_state_bytes = Gauge(
            "prfaas_max_state_bytes", "State memory that admitted requests may reserve in all, in bytes.", registry=r
        )
        self.reserved_bytes = Gauge(
            "prfaas_reserved_state_bytes", "State memory that admitted requests reserve, in bytes.", registry=r
        )
        self.threshold = Gauge(
            "prfaas_threshold_tokens", "Uncached prompt tokens above which prefill goes remote.", registry=r
        )
        self.threshold_factor = Gauge(
            "prfaas_threshold_factor",
            "How far the threshold is raised above the solved one since the far side cannot keep up; 1 is not at all.",
            registry=r,
        )
        self.max_stretch = Gauge(
            "prfaas_max_stretch",
            "How many times as long as its decode rows a step with a local prompt may take at the moment.",
            registry=r,
        )
        self.peer_ready = Gauge("prfaas_peer_ready", "1 when the peer takes work, else 0.", ["peer"], registry=r)
        self.draining = Gauge("prfaas_draining", "1 while draining, else 0.", registry=r)
