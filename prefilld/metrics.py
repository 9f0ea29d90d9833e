"""prefilld's own metrics. One sample each as its HELP says; durations in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.linkfacts import PathEstimate

_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
OUTCOMES = ("ok", "cancelled", "refused", "lost", "timeout", "error")
GATES = (
    "queued_requests",
    "tenant_requests",
    "queued_tokens",
    "state_bytes",
    "prompt_tokens",
    "deadline",
    "invalid",
    "draining",
    "damaged",
)

_PATH_GAUGES = {
    "goodput_bits_per_second": "Acknowledged payload, bits per second over the last second",
    "capacity_bits_per_second": "What the path carries when it is the limit, bits per second; 0 before it was",
    "cap_bits_per_second": "What the links together are held to, bits per second; 0 is no limit",
    "confidence_ratio": "How sure the capacity is, 0 to 1",
    "rtt_seconds": "Smoothed round-trip time, seconds",
    "queueing_seconds": "How much longer than the shortest round trip it is, seconds",
    "loss_ratio": "Part of the payload of the last second that was sent again, 0 to 1",
}


class PrefillMetrics:
    """All of prefilld's counters, gauges and histograms on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        r = registry
        self.prefills = Counter(
            "prfaas_prefills_total",
            "Prefill requests by outcome (ok, cancelled, refused, lost, timeout, error); one sample is one Prefill"
            " message.",
            ["outcome"],
            registry=r,
        )
        self.refused = Counter("prfaas_refused_total", "Prefill requests refused, by gate.", ["gate"], registry=r)
        self.handshakes_failed = Counter(
            "prfaas_handshakes_failed_total",
            "Connections that ended before their handshake was done, by error code; one sample is one connection.",
            ["code"],
            registry=r,
        )
        self.links_lost = Counter(
            "prfaas_links_lost_total",
            "Open links that closed and neither end had left, by error code (eof; link_lost: silence, a lost session).",
            ["code"],
            registry=r,
        )
        self.link_faults = Counter(
            "prfaas_link_faults_total",
            "Open links that closed since the protocol was broken or bytes were damaged on the way, by error code.",
            ["code"],
            registry=r,
        )
        self.prompt_tokens = Counter("prfaas_prompt_tokens_total", "Prompt tokens computed.", registry=r)
        self.chunks = Counter("prfaas_chunks_total", "Chunks computed for remote peers.", registry=r)
        why = "others than what was asked for were not worth it, or not finite"
        self.segments = Counter("prfaas_segments_total", f"Segments sent, by codec: {why}.", ["codec"], registry=r)
        self.raw_bytes = Counter("prfaas_raw_bytes_total", "State bytes before encoding.", registry=r)
        self.paused = Counter(
            "prfaas_stream_pauses_total", "Times a stream got no chunk since too much was unacknowledged.", registry=r
        )
        self.queue_s = Histogram(
            "prfaas_prefill_queue_seconds",
            "Seconds from Prefill to its first chunk; one sample is one request.",
            buckets=_BUCKETS,
            registry=r,
        )
        self.prefill_s = Histogram(
            "prfaas_prefill_seconds",
            "Seconds spent computing a prompt's chunks; one sample is one request.",
            buckets=_BUCKETS,
            registry=r,
        )
        self._make_push_metrics(r)
        self._make_link_metrics(r)
        self.running = Gauge("prfaas_running_requests", "Prefill requests admitted and not finished.", registry=r)
        self.queued = Gauge("prfaas_queued_requests", "Prefill requests waiting for admission.", registry=r)
        self.queued_tokens = Gauge("prfaas_queued_prompt_tokens", "Prompt tokens of queued requests.", registry=r)
        self.state_bytes = Gauge(
            "prfaas_state_bytes", "State memory held by the engine, by kind.", ["kind"], registry=r
        )
        self.draining = Gauge("prfaas_draining", "1 while draining, else 0.", registry=r)
        self._show_known_labels()

    def _make_push_metrics(self, r: CollectorRegistry) -> None:
        self.pushed_tokens = Counter(
            "prfaas_pushed_prompt_tokens_total",
            "Prompt tokens whose state a decoded sent, so that it was not computed here.",
            registry=r,
        )
        self.push_s = Histogram(
            "prfaas_push_seconds",
            "Seconds from the permission to push a prefix until all of it was there; one sample is one request.",
            buckets=_BUCKETS,
            registry=r,
        )

    def _make_link_metrics(self, r: CollectorRegistry) -> None:
        self.busy = Gauge(
            "prfaas_busy_ratio",
            "Part of the last minute's time that went to prompts of this peer.",
            ["peer"],
            registry=r,
        )
        self.sessions = Gauge("prfaas_sessions", "decodeds whose control link is open.", registry=r)
        self.links = Gauge("prfaas_links", "Open links of all sessions, control and data.", registry=r)
        self.link_bytes = Counter(
            "prfaas_link_bytes_total",
            "Bytes over the links of all sessions, frames and handshakes included, in and out.",
            ["direction"],
            registry=r,
        )
        self.resent_bytes = Counter(
            "prfaas_link_retransmitted_bytes_total",
            "Payload bytes that the kernel sent again on data links that are not on loopback.",
            registry=r,
        )
        self._paths = {
            name: Gauge(
                f"prfaas_path_{name}", f"{what}, by peer; data links that are not on loopback.", ["peer"], registry=r
            )
            for name, what in _PATH_GAUGES.items()
        }

    def _show_known_labels(self) -> None:
        """A label value that is not there yet would hide its first event from rate()."""
        for outcome in OUTCOMES:
            self.prefills.labels(outcome)
        for gate in GATES:
            self.refused.labels(gate)
        for direction in ("in", "out"):
            self.link_bytes.labels(direction)

    def show_busy(self, shares: Mapping[str, float]) -> None:
        """Set the gauge of what each decoded uses; who has used nothing for long is gone."""
        self.busy.clear()
        for peer, share in shares.items():
            self.busy.labels(peer).set(share)

    def show_paths(self, paths: Mapping[str, PathEstimate]) -> None:
        """Set the gauges of the paths to peers; those of others are gone."""
        for gauge in self._paths.values():
            gauge.clear()
        for peer, path in paths.items():
            shown = {
                "goodput_bits_per_second": path.goodput_bps,
                "capacity_bits_per_second": path.capacity_bps,
                "cap_bits_per_second": path.cap_bps or 0.0,
                "confidence_ratio": path.confidence,
                "rtt_seconds": path.rtt_s,
                "queueing_seconds": path.queueing_s,
                "loss_ratio": path.loss,
            }
            for name, value in shown.items():
                self._paths[name].labels(peer).set(value)
