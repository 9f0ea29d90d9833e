"""The answer of a plan as tables for people. What holds at saturation and what holds at the offered load stand apart.

Knows nothing but the answer. Called by plan.py and `decodectl plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.units import format_rate

_METHODS = (("closed_form", "closed form"), ("closed_form_mean", "E[T(L)]"), ("simulated", "simulated"))
Table = tuple[str, list[str], list[list[str]]]


def tables(answer: dict[str, Any]) -> list[Table]:
    """(title, header, rows) of each, one row per method and way."""
    found = [
        (
            "At saturation: the most that can be served",
            ["", "req/s", "threshold", "Np/Nd", "offloaded", "egress", "bottleneck"],
            [[name, *_at_saturation(answer, method, way, one)] for name, method, way, one in _rows(answer)],
        ),
        (
            "Bare prefill: seconds to the first token of a request that is alone",
            ["", "TTFT mean", "P90"],
            [
                [name, three(one["ttft_mean_s"]), three(one["ttft_p90_s"])]
                for name, method, _, one in _rows(answer)
                if method != "simulated"
            ],
        ),
    ]
    if "simulated" in answer:
        header = ["", "offered req/s", "good req/s", "SLO met", "egress", "TTFT mean", "P50", "P90", "P99", "TPOT P90"]
        rows = [[name, *_at_load(one)] for name, method, _, one in _rows(answer) if method == "simulated"]
        found.append(("At the offered load (arrivals.load): times in seconds, with waiting and transfer", header, rows))
    return found


def three(value: float) -> str:
    """Three significant digits, whatever the size: 0.0123, 1.20, 1234."""
    if not value:
        return "0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def _rows(answer: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for method, label in _METHODS:
        for way, one in answer.get(method, {}).items():
            yield f"{label}, {way}", method, way, one


def _at_saturation(answer: dict[str, Any], method: str, way: str, one: dict[str, Any]) -> list[str]:
    most = answer["saturation"][way] if method == "simulated" else one
    threshold = one["threshold_tokens"]
    return [
        three(one["throughput_rps"]),
        "-" if threshold is None else f"{threshold:.0f}",
        f"{one['num_prefill']:g}/{one['num_decode']:g}",
        f"{most['offloaded']:.1%}",
        format_rate(most["egress_bps"]),
        most["bottleneck"],
    ]


def _at_load(one: dict[str, Any]) -> list[str]:
    times = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p90_s")
    rates = [three(one["offered_rps"]), three(one["goodput_rps"]), f"{one['slo_met']:.1%}"]
    return [*rates, format_rate(one["egress_bps"]), *(three(one[key]) for key in times)]
