"""Metrics, facts and control verbs of a prefix cache, for both daemons. Counters follow what StateCache counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from common.daemon import Handler
from common.sched.tier import Tier
from common.state_cache import KINDS, StateCache

log = logging.getLogger(__name__)


class CacheMetrics:
    """Declared whether there is a cache or not, so that a missing one reads as zero."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"prfaas_cache_{name}_total", what, labels, registry=registry)

        self._lookups = counter("lookups", "Prompts looked up in the prefix cache, by result (hit, miss).", "result")
        self._tokens = counter(
            "looked_up_tokens",
            "Prompt tokens looked up, by result: those of a prefix that was found are hits.",
            "result",
        )
        self._stored = counter("stored_bytes", "State copied into the cache's memory, bytes by kind.", "kind")
        self._evicted = counter("evicted_bytes", "State given up for room in memory or on disk, bytes by kind.", "kind")
        self._not_stored = counter("not_stored", "Parts that found no room, in memory or on the way to disk.")
        self._disk = counter("disk_bytes", "State written to disk or read from it, bytes by direction.", "direction")
        self._disk_errors = counter("disk_errors", "Parts that could not be written to disk.")
        self._damaged = counter("damaged", "Parts on disk that were not what was written: removed, and computed again.")
        labels = ["kind", "tier"]
        self._held = Gauge("prfaas_cache_bytes", "State held, bytes by kind and tier.", labels, registry=registry)
        self._limit = Gauge(
            "prfaas_cache_limit_bytes", "Most of it, bytes by kind and tier.", labels, registry=registry
        )
        self._seen: dict[tuple[Counter, tuple[str, ...]], int] = {}

    def update(self, cache: StateCache | None) -> None:
        """Bring up to date; cheap."""
        if cache is None:
            return
        c = cache.counts
        self._to(self._lookups, c.num_hits, "hit")
        self._to(self._lookups, c.num_lookups - c.num_hits, "miss")
        self._to(self._tokens, c.hit_tokens, "hit")
        self._to(self._tokens, c.looked_up_tokens - c.hit_tokens, "miss")
        for counter, totals in ((self._stored, c.stored_bytes), (self._evicted, c.evicted_bytes)):
            for kind, num in totals.items():
                self._to(counter, num, kind)
        self._to(self._not_stored, c.num_not_stored)
        self._to(self._disk, c.disk_written_bytes, "write")
        self._to(self._disk, c.disk_read_bytes, "read")
        self._to(self._disk_errors, c.num_disk_errors)
        self._to(self._damaged, c.num_damaged)
        for name, tier in (("memory", cache.books.memory), ("disk", cache.books.disk)):
            for group, limit in tier.limits.items():
                self._held.labels(KINDS[group], name).set(tier.used[group])
                self._limit.labels(KINDS[group], name).set(limit)

    def _to(self, counter: Counter, total: int, *labels: str) -> None:
        before = self._seen.get((counter, labels), 0)
        self._seen[counter, labels] = total
        (counter.labels(*labels) if labels else counter).inc(total - before)


def cache_facts(cache: StateCache | None) -> dict[str, Any]:
    """What `cache stats` shows."""
    if cache is None:
        return {"is_on": False}
    c = cache.counts
    return {
        "is_on": True,
        "num_entries": len(cache.books.index),
        "num_lookups": c.num_lookups,
        "num_hits": c.num_hits,
        "looked_up_tokens": c.looked_up_tokens,
        "hit_tokens": c.hit_tokens,
        "hit_share": round(c.hit_tokens / c.looked_up_tokens, 4) if c.looked_up_tokens else 0.0,
        "memory": _tier(cache.books.memory),
        "disk": _tier(cache.books.disk),
        # Not what is held, which is above.
        "stored_since_start_bytes": dict(c.stored_bytes),
        "evicted_since_start_bytes": dict(c.evicted_bytes),
        "num_not_stored": c.num_not_stored,
        "num_damaged": c.num_damaged,
        "num_disk_errors": c.num_disk_errors,
    }


def cache_handlers(cache: Callable[[], StateCache | None]) -> dict[str, Handler]:
    """The control verbs `cache` and `cache_clear`."""

    async def facts(_: dict[str, Any]) -> Any:
        return cache_facts(cache())

    async def clear(_: dict[str, Any]) -> Any:
        found = cache()
        num_parts = found.clear() if found is not None else 0
        log.info("prefix cache cleared", extra={"num_parts": num_parts})
        return {"num_parts": num_parts, **cache_facts(found)}

    return {"cache": facts, "cache_clear": clear}


def _tier(tier: Tier) -> dict[str, dict[str, int]]:
    return {KINDS[group]: {"bytes": tier.used[group], "max_bytes": limit} for group, limit in tier.limits.items()}
