"""What came of a simulated run: percentiles, goodput, rates, shares. Called by plan.py and the benchmarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.sim.workload import SimRequest

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer is: time to first token by prompt tokens, and mean seconds between tokens."""

    ttft_s: Callable[[int], float]
    tpot_s: float

    def is_met(self, request: SimRequest) -> bool:
        """A thousandth is allowed for: the paper's decode profile stands exactly at its SLO."""
        return request.ttft_s <= self.ttft_s(request.num_prompt) and request.tpot_s <= 1.001 * self.tpot_s


def span_s(requests: Sequence[SimRequest]) -> float:
    """From the first arrival to the last: the time in which requests were offered."""
    arrived = [r.arrived_at for r in requests]
    return max(arrived) - min(arrived)


def goodput_rps(requests: Sequence[SimRequest], slo: Slo) -> float:
    """Requests per second of offering that were answered within the SLO."""
    return sum(slo.is_met(r) for r in requests) / span_s(requests)


def percentiles(values: Sequence[float], parts: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """{"p50": ...}"""
    return {f"p{p}": float(v) for p, v in zip(parts, np.percentile(values, parts), strict=True)}


def summary(requests: Sequence[SimRequest], num_link_bytes: float, slo: Slo | None = None) -> dict[str, Any]:
    """Everything of a run as JSON has it. TTFT counts waiting, transfer and the first decode step."""
    ttft, tpot = [r.ttft_s for r in requests], [r.tpot_s for r in requests]
    seconds = max(r.done_at for r in requests) - min(r.arrived_at for r in requests)
    places = Counter(r.place for r in requests)
    computed = sum(r.num_prompt for r in requests)
    out: dict[str, Any] = {
        "num_requests": len(requests),
        "throughput_rps": len(requests) / seconds,
        "offered_rps": (len(requests) - 1) / span_s(requests),
        "ttft_s": {"mean": float(np.mean(ttft)), **percentiles(ttft)},
        "tpot_s": {"mean": float(np.mean(tpot)), **percentiles(tpot)},
        "egress_bps": 8 * num_link_bytes / seconds,
        "offloaded": places["remote"] / len(requests),
        "places": dict(places),
        "prompt_tokens_per_s": computed / seconds,
    }
    predicted = [(r.predicted_ttft_s, r.ttft_s) for r in requests if r.predicted_ttft_s is not None]
    if predicted:
        out["prediction_error_s"] = percentiles([abs(p - t) for p, t in predicted])
    if slo is not None:
        out |= {"goodput_rps": goodput_rps(requests, slo), "slo_met": sum(map(slo.is_met, requests)) / len(requests)}
    return out
