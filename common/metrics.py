"""The Prometheus registry of a daemon and the conventions its metrics keep. Knows no metric of any module.

Names begin with `prfaas_` and end in their unit (`_seconds`, `_bytes`, `_tokens`; counters in `_total`). HELP says the
unit and what one sample is. `Metrics(...)` brings process metrics (`process_*`, `python_*`) and the build; modules
declare theirs on `metrics.registry` or through `counter`, `gauge`, `histogram`; `check` enforces the conventions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
CONTENT_TYPE = CONTENT_TYPE_LATEST
_NAME = re.compile(r"prfaas_[a-z][a-z0-9_]*")


def help_text(what: str, unit: str = "", sample: str = "") -> str:
    """HELP of a metric: what it is, and where there is something to say its unit and what is counted as one sample."""
    parts = (what.rstrip("."), f"Unit: {unit}" if unit else "", f"One sample: {sample}" if sample else "")
    return "".join(f"{part}. " for part in parts if part).rstrip()


class Metrics:
    """A registry of its own (not the process-wide default), so that several can live in one process."""

    def __init__(self, daemon: str, version: str) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)
        prometheus.PlatformCollector(registry=self.registry)
        prometheus.GCCollector(registry=self.registry)
        build = self.gauge("prfaas_build_info", "Always 1; the labels say what runs", labels=("daemon", "version"))
        build.labels(daemon, version).set(1)

    def tell_model(self, name: str, numerics: Mapping[str, str]) -> None:
        """Say which model runs and what it is computed with, once it is loaded."""
        labels = ("dtype", "kv_dtype", "weights")
        info = self.gauge("prfaas_model_info", "Always 1; the labels say what is served", labels=("model", *labels))
        info.labels(name, *(numerics.get(label, "") for label in labels)).set(1)

    def counter(self, name: str, what: str, *, unit: str = "", sample: str = "", labels: Sequence[str] = ()) -> Counter:
        """A counter; `name` ends in _total. Raises ValueError for a name outside the conventions."""
        _check_name(name)
        if not name.endswith("_total"):
            raise ValueError(f"counter {name!r} does not end in _total")
        return Counter(name, help_text(what, unit, sample), labels, registry=self.registry)

    def gauge(self, name: str, what: str, *, unit: str = "", labels: Sequence[str] = ()) -> Gauge:
        """A gauge. Raises ValueError for a name outside the conventions."""
        _check_name(name)
        return Gauge(name, help_text(what, unit), labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        what: str,
        *,
        sample: str,
        unit: str = "seconds",
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> Histogram:
        """A histogram whose name ends in its unit. Raises ValueError for a name outside the conventions."""
        _check_name(name)
        if not name.endswith(f"_{unit}"):
            raise ValueError(f"histogram {name!r} does not end in its unit _{unit}")
        return Histogram(name, help_text(what, unit, sample), labels, buckets=buckets, registry=self.registry)

    def render(self) -> bytes:
        """The text of /metrics, served as CONTENT_TYPE."""
        return prometheus.generate_latest(self.registry)

    def check(self) -> list[str]:
        """Metrics of ours that break the conventions, one sentence each; for tests."""
        problems = []
        for metric in self.registry.collect():
            if metric.name.startswith(("process_", "python_")):
                continue
            if not _NAME.fullmatch(metric.name):
                problems.append(f"{metric.name}: the name does not begin with prfaas_, or has capitals")
            if len(metric.documentation) < 10:
                problems.append(f"{metric.name}: HELP does not say unit and sample")
        return problems


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"metric name {name!r} must be lower case and begin with prfaas_")
